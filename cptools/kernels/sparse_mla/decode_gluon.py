# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sparse MLA decode from FP8 rows in Gluon for Hopper: two warpgroups attend, a third dequantises into their tiles."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ..arguments import aligned
from ..compile_spec import CompileSpec
from .decode_producer import produce, ring_slot
from .decode_relay import attend_even, attend_odd
from .decode_triton import LATENT, merge, on_device
from .gluon_relay_parts import BLOCK, HALF, HEADS, ROPE, barrier, shared, tile

PAIR = 128
"""Columns that the two warpgroups take at a time."""
HEAD_TILE = 64

INTEGERS = ("tokens", "heads", "head_tiles", "columns", "columns_per_part", "parts", "num_slots", "jobs")


# Sizes that change from call to call are not worth a compilation each.
@gluon.jit(do_not_specialize=INTEGERS)
def attend_jobs(
    query, words, halves, slots, counts, out, lse,
    tokens, heads, head_tiles, columns, columns_per_part, parts, num_slots, jobs, scale,
    HAS_COUNTS: gl.constexpr, WHOLE: gl.constexpr,
    ODD_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [parts, T, H, 512] of columns [part * columns_per_part, ...) of each query, and with WHOLE (one part)
    lse [T, H], else [2, parts, T, H]: largest score and sum of exp(scaled scores - it). A job is a (query, 64 heads,
    part); a program takes every num_programs-th."""
    quarters = (tile(BLOCK, HALF), tile(BLOCK, HALF), tile(BLOCK, HALF), tile(BLOCK, HALF))
    ropes = (tile(BLOCK, ROPE), tile(BLOCK, ROPE))
    tiles = quarters + ropes + (tile(HEADS, HALF), tile(HEADS, HALF))
    ring = (ring_slot(), ring_slot(), ring_slot(), ring_slot())
    used = (shared(gl.int32, BLOCK), shared(gl.int32, BLOCK))
    tops = (shared(gl.float32, HEADS), shared(gl.float32, HEADS))
    totals = (shared(gl.float32, HEADS), shared(gl.float32, HEADS))
    # An arrival of a cp.async is one a thread.
    full = (barrier(1), barrier(1), barrier(1), barrier(1), barrier(1), barrier(1), barrier(1), barrier(1))
    rope_full = (barrier(128), barrier(128))
    free = (barrier(1), barrier(1), barrier(1), barrier(1))
    exchange = (barrier(1), barrier(1), barrier(1), barrier(1))
    bars = full + rope_full + free + exchange + (barrier(256),)
    fence_async_shared()
    # Launches are placed while the one before them ends; nothing in global memory is touched above.
    gdc_wait()

    sizes = (heads, head_tiles, columns, columns_per_part, parts, counts if HAS_COUNTS else None)
    result = (out, lse, tokens.to(gl.int64))
    gl.warp_specialize(
        [
            (attend_even, (query, result, scale, sizes, jobs, tiles, used, tops, totals, bars, WHOLE)),
            (attend_odd, (query, result, scale, sizes, jobs, tiles, used, tops, totals, bars)),
            (produce, (words, halves, slots, num_slots, sizes, jobs, tiles, used, bars, ring)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[ODD_REGISTERS, PRODUCER_REGISTERS],
    )


REGISTERS = {"ODD_REGISTERS": 208, "PRODUCER_REGISTERS": 88}
"""Of 504, the even warpgroup gets the remaining 208."""


@torch.library.custom_op("cptools::sparse_mla_decode_gluon", mutates_args=())
def sparse_mla_decode_gluon(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    scale: float,
    parts: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launches of `sparse_mla_decode`, whose arguments these are; pool uint8 [S, 656], all contiguous."""
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, LATENT, dtype=out_dtype)
    lse = query.new_empty(tokens, heads, dtype=torch.float32)
    if parts == 1:
        part_out, part_sums = out, lse
    else:
        part_out = query.new_empty(parts, tokens, heads, LATENT, dtype=out_dtype)
        part_sums = query.new_empty(2, parts, tokens, heads, dtype=torch.float32)
    query, flat = aligned(query, 16), aligned(pool, 16).view(-1)
    columns, head_tiles = slots.shape[1], triton.cdiv(heads, HEAD_TILE)
    jobs = tokens * head_tiles * parts
    programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    with on_device(query.device):
        attend_jobs[(min(jobs, programs),)](
            query,
            flat.view(torch.int32),
            flat.view(torch.bfloat16),
            slots,
            slots if counts is None else counts,
            part_out,
            part_sums,
            tokens,
            heads,
            head_tiles,
            columns,
            triton.cdiv(triton.cdiv(columns, parts), PAIR) * PAIR,
            parts,
            pool.shape[0],
            jobs,
            scale,
            HAS_COUNTS=counts is not None,
            WHOLE=parts == 1,
            **REGISTERS,
            num_warps=4,
            launch_pdl=True,
        )
        if parts > 1:
            merge(part_out, part_sums, out, lse, scale, overlap=True)
    return out, lse


@sparse_mla_decode_gluon.register_fake
def _(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    scale: float,
    parts: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return (
        query.new_empty(tokens, heads, LATENT, dtype=out_dtype),
        query.new_empty(tokens, heads, dtype=torch.float32),
    )


def compile_specs() -> list[CompileSpec]:
    """The one tile, for both dtypes of the output."""
    return [
        CompileSpec(
            name=f"sparse_mla_decode_relay_{out}_out",
            fn=attend_jobs,
            signature={
                **{"query": "*bf16", "words": "*i32", "halves": "*bf16", "slots": "*i32", "counts": "*i32"},
                **{"out": f"*{out}", "lse": "*fp32"},
                **dict.fromkeys(INTEGERS, "i32"),
                "scale": "fp32",
                **dict.fromkeys(("HAS_COUNTS", "WHOLE", *REGISTERS), "constexpr"),
            },
            constexprs={"HAS_COUNTS": True, "WHOLE": False, **REGISTERS},
            gluon=True,
            # What the consumers need once a job (addresses, sizes) waits on the stack; the producer has none.
            max_spill_bytes=64,
            divisible_by_16=("query", "words", "halves", "slots", "out", "lse"),
        )
        for out in ("bf16", "fp32")
    ]
