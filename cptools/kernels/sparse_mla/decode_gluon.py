# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sparse MLA decode from FP8 rows in Gluon for Hopper: two warpgroups attend, a third dequantises into their tiles."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..compile_spec import CompileSpec
from .decode_producer import ROPE_0, produce
from .decode_seesaw import QUERY, attend_even, attend_odd
from .decode_triton import LATENT, merge, on_device

PAIR = 128
"""Columns that the two warpgroups take at a time."""
HEAD_TILE = 64

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit(do_not_specialize=("heads", "columns", "columns_per_part", "num_slots"))
def attend_pairs(
    query, words, halves, slots, counts, out, lse, heads, columns, columns_per_part, num_slots, scale,
    HAS_COUNTS: gl.constexpr, WHOLE: gl.constexpr,
    ODD_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [parts, T, H, 512] of columns [part * columns_per_part, ...) of each query, and with WHOLE (one part)
    lse [T, H], else [2, parts, T, H]: largest score and sum of exp(scaled scores - it)."""
    token = gl.program_id(0).to(gl.int64)
    first_head = gl.program_id(1) * 64
    part = gl.program_id(2)
    start = part * columns_per_part
    stop = gl.minimum(start + columns_per_part, columns)
    if HAS_COUNTS:
        stop = gl.minimum(stop, gl.load(counts + token).to(gl.int32))
    num_pairs = (gl.maximum(stop - start, 0) + 127) // 128

    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    weights1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    used = gl.allocate_shared_memory(gl.int32, [2, 64], VECTOR)
    tops = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    step = gl.allocate_shared_memory(gl.int64, [7, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(10):
        # An arrival of a cp.async is one a thread.
        mbarrier.init(full.index(j), count=128 if j >= ROPE_0 else 1)
    for j in gl.static_range(4):
        mbarrier.init(free.index(j), count=1)
    for j in gl.static_range(6):
        mbarrier.init(step.index(j), count=1)
    mbarrier.init(step.index(QUERY), count=256)
    fence_async_shared()

    state = token * heads + first_head
    query += state * 576
    heads_left = heads - first_head
    totals_at = gl.num_programs(0).to(gl.int64) * heads
    state += part * totals_at
    totals_at *= gl.num_programs(2)
    out += state * 512
    lse += state
    slots += token * columns
    gl.warp_specialize(
        [
            (attend_even, (query, out, lse, totals_at, heads_left, scale, num_pairs, q, q_rope, k, k_rope, weights1,
                           used, tops, sums, full, free, step, WHOLE)),
            (attend_odd, (query, out, heads_left, scale, num_pairs, q, q_rope, k, k_rope, weights1, used, tops,
                          sums, full, free, step)),
            (produce, (words, halves, slots, start, stop, num_slots, num_pairs, k, k_rope, used, full, free)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[ODD_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


REGISTERS = {"ODD_REGISTERS": 200, "PRODUCER_REGISTERS": 104}
"""Of 504, the even warpgroup gets the remaining 200. A producer that spills costs a third of the speed: a spilled
load is waited for at once."""


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
    flat = pool.view(-1)
    columns = slots.shape[1]
    with on_device(query.device):
        attend_pairs[(tokens, triton.cdiv(heads, HEAD_TILE), parts)](
            query,
            flat.view(torch.int32),
            flat.view(torch.bfloat16),
            slots,
            slots if counts is None else counts,
            part_out,
            part_sums,
            heads,
            columns,
            triton.cdiv(triton.cdiv(columns, parts), PAIR) * PAIR,
            pool.shape[0],
            scale,
            HAS_COUNTS=counts is not None,
            WHOLE=parts == 1,
            **REGISTERS,
            num_warps=4,
        )
        if parts > 1:
            merge(part_out, part_sums, out, lse, scale)
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
            name=f"sparse_mla_decode_seesaw_{out}_out",
            fn=attend_pairs,
            signature={
                "query": "*bf16",
                "words": "*i32",
                "halves": "*bf16",
                "slots": "*i32",
                "counts": "*i32",
                "out": f"*{out}",
                "lse": "*fp32",
                "heads": "i32",
                "columns": "i32",
                "columns_per_part": "i32",
                "num_slots": "i32",
                "scale": "fp32",
                **dict.fromkeys(("HAS_COUNTS", "WHOLE", *REGISTERS), "constexpr"),
            },
            constexprs={"HAS_COUNTS": True, "WHOLE": False, **REGISTERS},
            gluon=True,
            # What the even warpgroup needs after its loop (addresses, sizes) waits on the stack; the producer has none.
            max_spill_bytes=128,
            divisible_by_16=("query", "words", "halves", "slots", "out", "lse"),
        )
        for out in ("bf16", "fp32")
    ]
