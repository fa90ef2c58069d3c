# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sparse MLA decode in plain Triton: one program a (query, 64 heads, part of the selected rows), then a merge.

Latent columns are worked on in four tiles of 128, the width of one FP8 scale, so that a dequantised tile is an operand
of both products. The merge serves every split-K kernel of this op.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..arguments import aligned
from ..compile_spec import CompileSpec

LATENT = 512
ROPE = 64
HEAD_TILE = 64
BLOCK_N = 32
NUM_WARPS = 8
FP8_STAGES = 1
"""Dequantised in registers, so that raw bytes would only pass through shared memory once more."""
BF16_STAGES = 2


@triton.jit
def load_latent(values, scales, row, valid, tile: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    """128 columns of the rows of a block; masked rows are zeros, since a byte of theirs may be a NaN."""
    columns = tile * 128 + tl.arange(0, 128)
    if FP8:
        raw = tl.load(values + row[:, None] * 656 + columns[None, :], mask=valid[:, None], other=0.0)
        scale = tl.load(scales + row * 164 + (128 + tile), mask=valid, other=0.0)
        return (raw.to(tl.float32) * scale[:, None]).to(dtype)
    return tl.load(values + row[:, None] * 576 + columns[None, :], mask=valid[:, None], other=0.0).to(dtype)


# Sizes that only enter address arithmetic: a compilation for each of their properties would gain nothing.
@triton.jit(do_not_specialize=("heads", "columns", "columns_per_split", "num_slots"))
def attend_split(
    query,
    values,
    scales,
    rope,
    slots,
    counts,
    out,
    lse,
    heads,
    columns,
    columns_per_split,
    num_slots,
    scale,
    FP8: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [splits, T, H, 512] of columns [split * columns_per_split, ...) of each query, and with WHOLE (one split)
    lse [T, H], else [2, splits, T, H]: largest score and sum of exp(scaled scores - it)."""
    token = tl.program_id(0).to(tl.int64)
    head_tile = tl.program_id(1)
    split = tl.program_id(2).to(tl.int64)
    head = head_tile * 64 + tl.arange(0, 64)
    dtype = query.dtype.element_ty
    head_mask = (head < heads)[:, None]
    d = tl.arange(0, 128)
    at = query + (token * heads + head[:, None]) * 576 + d[None, :]
    q0 = tl.load(at, mask=head_mask, other=0.0)
    q1 = tl.load(at + 128, mask=head_mask, other=0.0)
    q2 = tl.load(at + 256, mask=head_mask, other=0.0)
    q3 = tl.load(at + 384, mask=head_mask, other=0.0)
    dr = tl.arange(0, 64)
    qr = tl.load(query + (token * heads + head[:, None]) * 576 + 512 + dr[None, :], mask=head_mask, other=0.0)

    start = split.to(tl.int32) * columns_per_split
    stop = tl.minimum(start + columns_per_split, columns)
    if HAS_COUNTS:
        stop = tl.minimum(tl.maximum(tl.load(counts + token), 0), stop).to(tl.int32)

    acc0 = tl.zeros((64, 128), tl.float32)
    acc1 = tl.zeros((64, 128), tl.float32)
    acc2 = tl.zeros((64, 128), tl.float32)
    acc3 = tl.zeros((64, 128), tl.float32)
    top = tl.full((64,), float("-inf"), tl.float32)
    total = tl.zeros((64,), tl.float32)
    scale_log2 = scale * 1.4426950408889634
    for block in tl.range(start, stop, BLOCK_N):
        column = block + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + token * columns + column, mask=column < stop, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < num_slots)
        row = tl.where(valid, slot, 0)
        k0 = load_latent(values, scales, row, valid, 0, FP8, dtype)
        k1 = load_latent(values, scales, row, valid, 1, FP8, dtype)
        k2 = load_latent(values, scales, row, valid, 2, FP8, dtype)
        k3 = load_latent(values, scales, row, valid, 3, FP8, dtype)
        if FP8:
            rope_at = row[:, None] * 328 + 264
        else:
            rope_at = row[:, None] * 576 + 512
        kr = tl.load(rope + rope_at + dr[None, :], mask=valid[:, None], other=0.0).to(dtype)
        scores = tl.dot(q0, tl.trans(k0))
        scores = tl.dot(q1, tl.trans(k1), scores)
        scores = tl.dot(q2, tl.trans(k2), scores)
        scores = tl.dot(q3, tl.trans(k3), scores)
        scores = tl.dot(qr, tl.trans(kr), scores)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        # The difference first: scale * score - scale * top, contracted to an fma, is not 0 for the top at 1e30.
        weights = tl.exp2((scores - base[:, None]) * scale_log2)
        keep = tl.exp2((top - base) * scale_log2)
        total = total * keep + tl.sum(weights, 1)
        top = new_top
        p = weights.to(dtype)
        acc0 = tl.dot(p, k0, acc0 * keep[:, None])
        acc1 = tl.dot(p, k1, acc1 * keep[:, None])
        acc2 = tl.dot(p, k2, acc2 * keep[:, None])
        acc3 = tl.dot(p, k3, acc3 * keep[:, None])

    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
    state = (split * tl.num_programs(0) + token) * heads + head
    if WHOLE:
        tl.store(lse + state, tl.where(empty, float("-inf"), top * scale + tl.log(total)), mask=head < heads)
    else:
        tl.store(lse + state, top, mask=head < heads)
        states = tl.num_programs(0).to(tl.int64) * heads
        tl.store(lse + tl.num_programs(2) * states + state, total, mask=head < heads)
    to = out + state[:, None] * 512 + d[None, :]
    result = out.dtype.element_ty
    tl.store(to, (acc0 * share).to(result), mask=head_mask)
    tl.store(to + 128, (acc1 * share).to(result), mask=head_mask)
    tl.store(to + 256, (acc2 * share).to(result), mask=head_mask)
    tl.store(to + 384, (acc3 * share).to(result), mask=head_mask)


@triton.jit(do_not_specialize=("states",))
def merge_parts(
    part_out,
    part_sums,
    out,
    lse,
    states,
    scale,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """COLUMNS of one state (query, head) a program, all loads in flight together; BLOCK is PARTS up to a power of two.

    Parts come with the largest score and the sum apart, not as one lse: at 1e4 its rounding moves weights by 1e-3.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    state = tl.program_id(0).to(tl.int64)
    stride = states.to(tl.int64)
    part = tl.arange(0, BLOCK)
    live = part < PARTS
    at = part * stride + state
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(part_out + at[:, None] * 512 + d[None, :], mask=live[:, None], other=0.0)
    tops = tl.load(part_sums + at, mask=live, other=float("-inf"))
    totals = tl.load(part_sums + PARTS * stride + at, mask=live, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = totals * tl.exp2((tops - base) * (scale * 1.4426950408889634))
    total = tl.sum(weight, 0)
    empty = total == 0.0
    weight *= tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    # Parts without rows hold zeros, so their weight of 0 meets no NaN.
    acc = tl.sum(weight[:, None] * values.to(tl.float32), 0)
    tl.store(out + state * 512 + d, acc.to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + state, tl.where(empty, float("-inf"), top * scale + tl.log(total)))


def merge_shape(states: int, parts: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """BLOCK, COLUMNS and warps.

    Where states fill the chip, a thread has its columns of all parts and needs no other thread's. Few states of many
    parts are cut in columns, so that the whole chip reads, and summed across warps.
    """
    block = int(triton.next_power_of_2(parts))
    columns_per_warp = 32 * 16 // dtype.itemsize
    if parts >= 16 and states <= 128:
        return block, 128, 4
    return block, LATENT, max(block // 16, 1) * LATENT // columns_per_warp


def merge(part_out: Tensor, part_sums: Tensor, out: Tensor, lse: Tensor, scale: float, *, overlap: bool) -> None:
    """part_out [P, T, H, 512], part_sums [2, P, T, H] -> out [T, H, 512], lse [T, H].

    overlap: it is placed while the launch before it ends (programmatic dependent launch), and waits for its stores.
    """
    states, parts = lse.numel(), part_out.shape[0]
    block, columns, warps = merge_shape(states, parts, part_out.dtype)
    merge_parts[(states, LATENT // columns)](
        part_out,
        part_sums,
        out,
        lse,
        states,
        scale,
        PARTS=parts,
        BLOCK=block,
        COLUMNS=columns,
        OVERLAP=overlap,
        num_warps=warps,
        **({"launch_pdl": True} if overlap else {}),
    )


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@torch.library.custom_op("cptools::sparse_mla_decode_triton", mutates_args=())
def sparse_mla_decode_triton(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    scale: float,
    fp8: bool,
    parts: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launches of `sparse_mla_decode`, whose arguments these are; pool uint8 [S, row_bytes], all contiguous."""
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, LATENT, dtype=out_dtype)
    lse = query.new_empty(tokens, heads, dtype=torch.float32)
    if parts == 1:
        part_out, part_sums = out, lse
    else:
        part_out = query.new_empty(parts, tokens, heads, LATENT, dtype=out_dtype)
        part_sums = query.new_empty(2, parts, tokens, heads, dtype=torch.float32)
    flat = aligned(pool, 16).view(-1)
    values = flat.view(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    columns = slots.shape[1]
    with on_device(query.device):
        attend_split[(tokens, triton.cdiv(heads, HEAD_TILE), parts)](
            query,
            values,
            flat.view(torch.float32),
            flat.view(torch.bfloat16),
            slots,
            slots if counts is None else counts,
            part_out,
            part_sums,
            heads,
            columns,
            triton.cdiv(triton.cdiv(columns, parts), BLOCK_N) * BLOCK_N,
            pool.shape[0],
            scale,
            FP8=fp8,
            HAS_COUNTS=counts is not None,
            WHOLE=parts == 1,
            BLOCK_N=BLOCK_N,
            num_warps=NUM_WARPS,
            num_stages=FP8_STAGES if fp8 else BF16_STAGES,
        )
        if parts > 1:
            merge(part_out, part_sums, out, lse, scale, overlap=False)
    return out, lse


@sparse_mla_decode_triton.register_fake
def _(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    scale: float,
    fp8: bool,
    parts: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return (
        query.new_empty(tokens, heads, LATENT, dtype=out_dtype),
        query.new_empty(tokens, heads, dtype=torch.float32),
    )


def compile_specs() -> list[CompileSpec]:
    """Both row formats, and the merge of as many parts as one query is split in."""
    specs = [
        CompileSpec(
            name=f"sparse_mla_decode_{rows}_rows",
            fn=attend_split,
            signature={
                "query": "*bf16",
                "values": "*fp8e4nv" if rows == "fp8" else "*bf16",
                "scales": "*fp32",
                "rope": "*bf16",
                "slots": "*i32",
                "counts": "*i32",
                "out": "*bf16",
                "lse": "*fp32",
                "heads": "i32",
                "columns": "i32",
                "columns_per_split": "i32",
                "num_slots": "i32",
                "scale": "fp32",
                "FP8": "constexpr",
                "HAS_COUNTS": "constexpr",
                "WHOLE": "constexpr",
                "BLOCK_N": "constexpr",
            },
            constexprs={
                "FP8": rows == "fp8",
                "HAS_COUNTS": True,
                "WHOLE": False,
                "BLOCK_N": BLOCK_N,
            },
            num_warps=NUM_WARPS,
            num_stages=FP8_STAGES if rows == "fp8" else BF16_STAGES,
            # Three registers, once a program: still 0.6 us faster at one query than two stages without a spill.
            max_spill_bytes=16 if rows == "fp8" else 0,
            divisible_by_16=("query", "values", "scales", "rope", "slots", "out"),
        )
        for rows in ("fp8", "bf16")
    ]
    for parts, states, name, dtype in (
        (2, 4096, "bf16", torch.bfloat16),
        (8, 1024, "fp32", torch.float32),
        (64, 256, "bf16", torch.bfloat16),
        (64, 64, "bf16", torch.bfloat16),
        (64, 64, "fp32", torch.float32),
    ):
        block, columns, warps = merge_shape(states, parts, dtype)
        specs.append(
            CompileSpec(
                name=f"sparse_mla_decode_merge_{parts}_parts_of_{states}_{name}",
                fn=merge_parts,
                signature={
                    "part_out": f"*{name}",
                    "part_sums": "*fp32",
                    "out": f"*{name}",
                    "lse": "*fp32",
                    "states": "i32",
                    "scale": "fp32",
                    "PARTS": "constexpr",
                    "BLOCK": "constexpr",
                    "COLUMNS": "constexpr",
                    "OVERLAP": "constexpr",
                },
                constexprs={"PARTS": parts, "BLOCK": block, "COLUMNS": columns, "OVERLAP": True},
                num_warps=warps,
                divisible_by_16=("part_out", "part_sums", "out", "lse"),
            )
        )
    return specs
