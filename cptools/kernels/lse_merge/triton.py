"""The merge as one pass over the parts: a program owns whole (token, head) rows, no thread needs another's sum."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec

MAX_PARTS = 8
"""Parts that one launch takes as separate tensors; a longer list is merged in several."""
MAX_BLOCK = 512

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)


@triton.jit
def exp_of_gap(x):
    """exp(x) for x <= 0 or NaN. exp2(x * log2 e) alone loses x * 2^-24 of the result: here x is reduced first."""
    n = tl.floor(x * LOG2E + 0.5)
    rest = tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, x))
    return tl.where(x < -150.0, 0.0, tl.exp2(rest * LOG2E) * tl.exp2(n))


@triton.jit
def negative_zero():
    """The neutral element of the addition. By its bits: the compiler takes a literal -0.0 for 0.0."""
    return tl.full([1], -0x80000000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def safe_peak(peak):
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def positions(first_row, rows, heads, stride_t, stride_h, ROWS: tl.constexpr):
    """Rows of the program, whether they exist, and the offset of each in a [T, H, ...] tensor."""
    row = first_row + tl.arange(0, ROWS)
    live = row < rows
    token = (row // heads).to(tl.int64)
    return row.to(tl.int64), live, token * stride_t + (row % heads) * stride_h


@triton.jit
def merge_parts_kernel(
    out0,
    out1,
    out2,
    out3,
    out4,
    out5,
    out6,
    out7,
    lse0,
    lse1,
    lse2,
    lse3,
    lse4,
    lse5,
    lse6,
    lse7,
    merged,
    merged_lse,
    rows,
    heads,
    dim,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    lses = (lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7)
    first = tl.program_id(0) * ROWS
    row, live, lse_at = positions(first, rows, heads, lse_stride_t, lse_stride_h, ROWS)
    _, _, out_at = positions(first, rows, heads, out_stride_t, out_stride_h, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = live[:, None] & (col < dim)[None, :]

    peak = tl.load(lses[0] + lse_at, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        lse = tl.load(lses[part] + lse_at, mask=live, other=0.0)
        peak = tl.maximum(peak, lse, propagate_nan=tl.PropagateNan.ALL)
    base = safe_peak(peak)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        total += exp_of_gap(tl.load(lses[part] + lse_at, mask=live, other=0.0) - base)
    total = tl.where(peak == -float("inf"), 1.0, total)

    nothing = tl.broadcast_to(negative_zero()[:, None], [ROWS, BLOCK])
    summed = nothing
    for part in tl.static_range(PARTS):
        lse = tl.load(lses[part] + lse_at, mask=live, other=0.0)
        weight = exp_of_gap(lse - base) / total
        # Not masked by the lse: the rows are then on their way while the weights are made.
        value = tl.load(outs[part] + out_at[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        summed += tl.where((lse == -float("inf"))[:, None], nothing, value * weight[:, None])
    summed = tl.where((peak == -float("inf"))[:, None], 0.0, summed)
    tl.store(merged + row[:, None] * dim + col[None, :], summed.to(merged.dtype.element_ty), mask=mask)
    tl.store(merged_lse + row, peak + tl.log(total), mask=live & (tl.program_id(1) == 0))


@triton.jit
def merge_stacked_kernel(
    outs,
    lses,
    merged,
    merged_lse,
    rows,
    heads,
    dim,
    out_stride_p,
    out_stride_t,
    out_stride_h,
    lse_stride_p,
    lse_stride_t,
    lse_stride_h,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row, live, lse_at = positions(first, rows, heads, lse_stride_t, lse_stride_h, ROWS)
    _, _, out_at = positions(first, rows, heads, out_stride_t, out_stride_h, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = live[:, None] & (col < dim)[None, :]

    # Pointers walk from part to part: their distance may be beyond 2^31, its products are never formed.
    lse_of = lses + lse_at
    peak = tl.load(lse_of, mask=live, other=0.0)
    for _ in range(1, PARTS):
        lse_of += lse_stride_p
        peak = tl.maximum(peak, tl.load(lse_of, mask=live, other=0.0), propagate_nan=tl.PropagateNan.ALL)
    base = safe_peak(peak)
    total = tl.zeros([ROWS], tl.float32)
    lse_of = lses + lse_at
    for _ in range(PARTS):
        total += exp_of_gap(tl.load(lse_of, mask=live, other=0.0) - base)
        lse_of += lse_stride_p
    total = tl.where(peak == -float("inf"), 1.0, total)

    nothing = tl.broadcast_to(negative_zero()[:, None], [ROWS, BLOCK])
    summed = nothing
    lse_of = lses + lse_at
    out_of = outs + out_at[:, None] + col[None, :]
    for _ in range(PARTS):
        lse = tl.load(lse_of, mask=live, other=0.0)
        weight = exp_of_gap(lse - base) / total
        value = tl.load(out_of, mask=mask, other=0.0).to(tl.float32)
        summed += tl.where((lse == -float("inf"))[:, None], nothing, value * weight[:, None])
        lse_of += lse_stride_p
        out_of += out_stride_p
    summed = tl.where((peak == -float("inf"))[:, None], 0.0, summed)
    tl.store(merged + row[:, None] * dim + col[None, :], summed.to(merged.dtype.element_ty), mask=mask)
    tl.store(merged_lse + row, peak + tl.log(total), mask=live & (tl.program_id(1) == 0))


@torch.library.custom_op("cptools::merge_parts", mutates_args=())
def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """At most MAX_PARTS parts [T, H, D] with lse [T, H] -> out [T, H, D] in out_dtype, lse [T, H] fp32."""
    merged, merged_lse = outputs(outs[0], out_dtype)
    outs, lses = alike(outs), alike(lses)
    pad = MAX_PARTS - len(outs)
    launch(
        merge_parts_kernel,
        [*outs, *[outs[0]] * pad, *lses, *[lses[0]] * pad],
        merged,
        merged_lse,
        [*outs[0].stride()[:2], *lses[0].stride()],
        PARTS=len(outs),
    )
    return merged, merged_lse


@torch.library.custom_op("cptools::merge_stacked", mutates_args=())
def merge_stacked(outs: Tensor, lses: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """outs [P, T, H, D] with lses [P, T, H], of any strides, any P >= 1 -> as merge_parts."""
    merged, merged_lse = outputs(outs[0], out_dtype)
    if outs.stride(3) != 1:
        outs = outs.contiguous()
    launch(
        merge_stacked_kernel, [outs, lses], merged, merged_lse, [*outs.stride()[:3], *lses.stride()], PARTS=len(outs)
    )
    return merged, merged_lse


@merge_parts.register_fake
def fake_merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return outputs(outs[0], out_dtype)


@merge_stacked.register_fake
def fake_merge_stacked(outs: Tensor, lses: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return outputs(outs[0], out_dtype)


def merge(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge any number of parts; see ``cptools.kernels.lse_merge.merge_states``."""
    if len(outs) > MAX_PARTS and isinstance(outs, Tensor) and isinstance(lses, Tensor):
        out, lse = merge_stacked(outs, lses, out_dtype)
        return out, lse
    outs, lses = list(outs), list(lses)
    while len(outs) > MAX_PARTS:
        out, lse = merge_parts(outs[:MAX_PARTS], lses[:MAX_PARTS], torch.float32)
        outs, lses = [out, *outs[MAX_PARTS:]], [lse, *lses[MAX_PARTS:]]
    out, lse = merge_parts(outs, lses, out_dtype)
    return out, lse


def outputs(part: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(part.shape, dtype=out_dtype, device=part.device),
        torch.empty(part.shape[:2], dtype=torch.float32, device=part.device),
    )


def alike(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors themselves where all have the same strides and dense rows, as slices of one buffer do."""
    first = tensors[0]
    if all(x.stride() == first.stride() for x in tensors) and (first.dim() == 2 or first.stride(2) == 1):
        return tensors
    return [x.contiguous() for x in tensors]


def tile(rows: int) -> tuple[int, int]:
    """(rows, warps) of a program: one warp, and a single row while these are too few to fill the chip."""
    return (1, 1) if rows <= 4096 else (2, 1)


def launch(
    kernel: Any, tensors: Sequence[Tensor], merged: Tensor, lse: Tensor, strides: Sequence[int], **constexprs: int,
) -> None:  # fmt: skip
    tokens, heads, dim = merged.shape
    rows = tokens * heads
    if rows == 0 or dim == 0:
        return
    block = min(MAX_BLOCK, triton.next_power_of_2(dim))
    per_program, warps = tile(rows)
    grid = (triton.cdiv(rows, per_program), triton.cdiv(dim, block))
    kernel[grid](
        *tensors, merged, lse, rows, heads, dim, *strides,
        **constexprs, ROWS=per_program, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    specs = []
    for per_program, warps in (tile(1), tile(1 << 20)):
        tiles = {"ROWS": per_program, "BLOCK": MAX_BLOCK}
        sizes = dict.fromkeys(["rows", "heads", "dim", "out_stride_t", "out_stride_h", "lse_stride_t"], "i32")
        sizes["lse_stride_h"] = "i32"
        for dtype, parts in (("*bf16", 2), ("*bf16", 8), ("*fp32", 8)):
            pointers = {f"out{i}": dtype for i in range(MAX_PARTS)} | {f"lse{i}": "*fp32" for i in range(MAX_PARTS)}
            pointers |= {"merged": dtype, "merged_lse": "*fp32"}
            specs.append(
                CompileSpec(
                    name=f"merge_parts-{parts}x{dtype[1:]}-{per_program}rows",
                    fn=merge_parts_kernel,
                    signature=pointers | sizes | {"PARTS": "constexpr"} | dict.fromkeys(tiles, "constexpr"),
                    constexprs=tiles | {"PARTS": parts},
                    num_warps=warps,
                    divisible_by_16=(*pointers, "dim", "out_stride_t", "out_stride_h"),
                )
            )
        pointers = {"outs": "*bf16", "lses": "*fp32", "merged": "*bf16", "merged_lse": "*fp32"}
        strides = {f"{x}_stride_{axis}": "i32" for x in ("out", "lse") for axis in "pth"}
        counts = dict.fromkeys(["rows", "heads", "dim"], "i32")
        specs.append(
            CompileSpec(
                name=f"merge_stacked-bf16-{per_program}rows",
                fn=merge_stacked_kernel,
                signature=pointers | counts | strides | {"PARTS": "constexpr"} | dict.fromkeys(tiles, "constexpr"),
                constexprs=tiles | {"PARTS": 32},
                num_warps=warps,
                divisible_by_16=(*pointers, "dim", "out_stride_p", "out_stride_t", "out_stride_h"),
            )
        )
    return specs
