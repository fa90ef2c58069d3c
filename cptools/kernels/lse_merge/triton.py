"""The merge as one pass over the parts: a program owns whole (token, head) rows, no thread needs another's sum."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..dependent_launch import let_next_start, overlapped, wait_for_inputs

MAX_PARTS = 8
"""Parts that one launch takes as separate tensors; a longer list is merged in several."""
MAX_BLOCK = 512
MAX_GRID_Y = 65535
FEWEST_ROWS, FEW_ROWS = 512, 2048  # of which a program takes one each, and two
WARP_BYTES = 512  # what a warp loads by one instruction

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
def start_of_sum(peak):
    """-0.0, the neutral element of the addition, or 0.0 for rows of which all parts are empty."""
    # By its bits: the compiler takes a literal -0.0 for 0.0.
    return tl.where(peak == -float("inf"), 0, -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def add_part(summed, value, weight, lse):
    """summed [CHUNKS, ROWS, INNER] + value * weight; an empty part adds nothing, whatever it holds."""
    added = tl.fma(value.to(tl.float32), tl.broadcast_to(weight[None, :, None], value.shape), summed)
    return tl.where((lse == -float("inf"))[None, :, None], summed, added)


@triton.jit
def safe_peak(peak):
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def place(
    tokens,
    heads,
    dim,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FULL: tl.constexpr,
):
    """Token and heads of the program, which of them exist, its columns [CHUNKS, 1, INNER], which values exist.

    Heads stand in the middle of a tile, so that each warp gets rows of its own. The grid names the token: no address
    waits for a division.
    """
    token = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    head = ((tl.program_id(0) // SPLIT) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    chunk = (tl.program_id(0) % SPLIT) * CHUNKS + tl.arange(0, CHUNKS)
    col = chunk[:, None, None] * INNER + tl.arange(0, INNER)[None, None, :]
    if FULL:
        live = tl.full([ROWS], True, tl.int1)
        mask = tl.full([CHUNKS, ROWS, INNER], True, tl.int1)
    else:
        live = (head < heads) & (token < tokens)
        mask = live[None, :, None] & (col < dim)
    return token, head, live, col, mask


@triton.jit
def store_merged(merged, merged_lse, summed, peak, total, row, live, col, mask, dim):
    out_at = merged + row[None, :, None] * dim + col
    # Streamed, so that the output does not push parts that are still to be read out of L2.
    tl.store(out_at, summed.to(merged.dtype.element_ty), mask=mask, cache_modifier=".cs")
    tl.store(merged_lse + row, peak + tl.log(total), mask=live)


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
    tokens,
    heads,
    dim,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FULL: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    lses = (lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7)
    token, head, live, col, mask = place(tokens, heads, dim, ROWS, CHUNKS, INNER, SPLIT, FULL)
    lse_at = token * lse_stride_t + head * lse_stride_h
    out_at = (token * out_stride_t + head * out_stride_h)[None, :, None] + col
    wait_for_inputs(OVERLAP, EARLY)

    # All loads first, and none of them masked by an lse: they wait for memory together.
    lse: tl.tuple = ()
    value: tl.tuple = ()
    for part in tl.static_range(PARTS):
        lse = lse + (tl.load(lses[part] + lse_at, mask=live, other=0.0),)
    for part in tl.static_range(PARTS):
        value = value + (tl.load(outs[part] + out_at, mask=mask, other=0.0),)
    peak = lse[0]
    for part in tl.static_range(1, PARTS):
        peak = tl.maximum(peak, lse[part], propagate_nan=tl.PropagateNan.ALL)
    base = safe_peak(peak)
    total = exp_of_gap(lse[0] - base)
    for part in tl.static_range(1, PARTS):
        total += exp_of_gap(lse[part] - base)
    total = tl.where(peak == -float("inf"), 1.0, total)

    summed = tl.broadcast_to(start_of_sum(peak)[None, :, None], [CHUNKS, ROWS, INNER])
    for part in tl.static_range(PARTS):
        summed = add_part(summed, value[part], exp_of_gap(lse[part] - base) / total, lse[part])
    let_next_start(OVERLAP, EARLY)
    store_merged(merged, merged_lse, summed, peak, total, token * heads + head, live, col, mask, dim)


@triton.jit
def merge_stacked_kernel(
    outs,
    lses,
    merged,
    merged_lse,
    tokens,
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
    CHUNKS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    FULL: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, head, live, col, mask = place(tokens, heads, dim, ROWS, CHUNKS, INNER, SPLIT, FULL)
    lse_at = token * lse_stride_t + head * lse_stride_h
    out_at = (token * out_stride_t + head * out_stride_h)[None, :, None] + col
    wait_for_inputs(OVERLAP, EARLY)

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

    summed = tl.broadcast_to(start_of_sum(peak)[None, :, None], [CHUNKS, ROWS, INNER])
    lse_of = lses + lse_at
    out_of = outs + out_at
    for _ in range(PARTS):
        lse = tl.load(lse_of, mask=live, other=0.0)
        value = tl.load(out_of, mask=mask, other=0.0)
        summed = add_part(summed, value, exp_of_gap(lse - base) / total, lse)
        lse_of += lse_stride_p
        out_of += out_stride_p
    let_next_start(OVERLAP, EARLY)
    store_merged(merged, merged_lse, summed, peak, total, token * heads + head, live, col, mask, dim)


@torch.library.custom_op("cptools::merge_parts", mutates_args=())
def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """At most MAX_PARTS parts [T, H, D] with lse [T, H] -> out [T, H, D] in out_dtype, lse [T, H] fp32."""
    merged, merged_lse = outputs(outs[0], out_dtype)
    outs, lses = alike(outs), alike(lses)
    pad = MAX_PARTS - len(outs)
    launch(
        merge_parts_kernel,
        [*outs, *[None] * pad, *lses, *[None] * pad],
        merged,
        merged_lse,
        [*outs[0].stride()[:2], *lses[0].stride()],
        parts=len(outs),
        element_bytes=outs[0].element_size(),
    )
    return merged, merged_lse


@torch.library.custom_op("cptools::merge_stacked", mutates_args=())
def merge_stacked(outs: Tensor, lses: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """outs [P, T, H, D] with lses [P, T, H], of any strides, any P >= 1 -> as merge_parts."""
    merged, merged_lse = outputs(outs[0], out_dtype)
    if outs.stride(3) != 1:
        outs = outs.contiguous()
    launch(
        merge_stacked_kernel,
        [outs, lses],
        merged,
        merged_lse,
        [*outs.stride()[:3], *lses.stride()],
        parts=len(outs),
        element_bytes=outs.element_size(),
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
    if len(outs) <= MAX_PARTS:
        out, lse = merge_parts(list(outs), list(lses), out_dtype)
        return out, lse
    # A copy rather than a chain of merges: a merged lse is rounded, and weights made from it are too.
    stacked = outs if isinstance(outs, Tensor) else torch.stack([part.float() for part in outs])
    stacked_lse = lses if isinstance(lses, Tensor) else torch.stack(list(lses))
    out, lse = merge_stacked(stacked, stacked_lse, out_dtype)
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


def tile(tokens: int, heads: int, dim: int, element_bytes: int) -> tuple[dict[str, int], int]:
    """(constexprs, warps) of a program: as few rows as fill the chip, and a warp for each where they are many."""
    inner = WARP_BYTES // element_bytes
    chunks = min(MAX_BLOCK // inner, triton.next_power_of_2(max(1, triton.cdiv(dim, inner))))
    few = tokens * heads <= FEW_ROWS
    rows = 1 if tokens * heads <= FEWEST_ROWS else 2 if few else 4
    rows = min(rows, triton.next_power_of_2(heads))
    split = max(1, triton.cdiv(dim, chunks * inner))  # without values there still is an lse
    full = heads % rows == 0 and tokens <= MAX_GRID_Y and dim == split * chunks * inner
    return {"ROWS": rows, "CHUNKS": chunks, "INNER": inner, "SPLIT": split, "FULL": full}, 1 if few else rows


def launch(
    kernel: Any,
    tensors: Sequence[Tensor | None],
    merged: Tensor,
    lse: Tensor,
    strides: Sequence[int],
    *,
    parts: int,
    element_bytes: int,
) -> None:
    tokens, heads, dim = merged.shape
    if lse.numel() == 0:
        return
    constexprs, warps = tile(tokens, heads, dim, element_bytes)
    programs = triton.cdiv(heads, constexprs["ROWS"]) * constexprs["SPLIT"]
    grid = (programs, min(tokens, MAX_GRID_Y), triton.cdiv(tokens, MAX_GRID_Y))
    options = {**constexprs, **overlapped(merged, early=tokens * heads <= FEW_ROWS), "num_warps": warps}
    kernel[grid](*tensors, merged, lse, tokens, heads, dim, *strides, PARTS=parts, **options)


def compile_specs() -> list[CompileSpec]:
    specs = []
    sizes = ["tokens", "heads", "dim"] + [f"{x}_stride_{axis}" for x in ("out", "lse") for axis in "pth"]
    for tokens, heads in ((1, 64), (1, 63), (16, 64), (64, 64), (64, 63)):
        for dtype, parts, stacked in (
            *(("bf16", 2, False), ("bf16", 8, False), ("fp32", 2, False), ("fp32", 8, False)),
            ("bf16", 32, True),
        ):
            kernel = merge_stacked_kernel if stacked else merge_parts_kernel
            tiles, warps = tile(tokens, heads, 512, 4 if dtype == "fp32" else 2)
            pointers = {"outs": f"*{dtype}", "lses": "*fp32", "merged": f"*{dtype}", "merged_lse": "*fp32"}
            for part in range(parts):
                pointers |= {f"out{part}": f"*{dtype}", f"lse{part}": "*fp32"}
            types = pointers | dict.fromkeys(sizes, "i32")
            signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
            values = tiles | {"PARTS": parts, "OVERLAP": True, "EARLY": warps == 1}
            specs.append(
                CompileSpec(
                    name=f"{'stacked' if stacked else 'parts'}-{parts}x{dtype}-{tokens}x{heads}",
                    fn=kernel,
                    signature=signature,
                    constexprs={name: values.get(name) for name, kind in signature.items() if kind == "constexpr"},
                    num_warps=warps,
                    options={"launch_pdl": True},
                    divisible_by_16=tuple(
                        name
                        for name in signature
                        if name in pointers or name in ("dim", "out_stride_p", "out_stride_t", "out_stride_h")
                    ),
                )
            )
    return specs
