"""Rows of activations to FP8 in one pass, alone or fused with the operation that makes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..dependent_launch import overlapped, wait_for_inputs
from .matrix import BLOCK

_WARPS = 4
_NORM_BLOCKS = 16  # of 128 columns, that a program holds in one piece
_NORM_WARPS = 8

TO_FULL = tl.constexpr(1 / 448)  # largest e4m3 value


@triton.jit
def store_quantised(x, values_at, scales_at, mask, scale_mask):
    """x [R, G, 128] fp32 to e4m3 and one scale for each 128, by the same operations as the reference."""
    # By the bits of magnitudes: these order NaN above all, so it stays visible.
    top = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 2)
    top = tl.maximum(top, 0x2B8CBCCC).to(tl.float32, bitcast=True)  # 1e-12
    scale = top * TO_FULL
    inverse = tl.div_rn(1.0, scale)
    tl.store(values_at, (x * inverse[:, :, None]).to(tl.float8e4nv), mask=mask)
    tl.store(scales_at, scale, mask=scale_mask)


@triton.jit
def load_sum(at, part_stride, mask, PARTS: tl.constexpr):
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        at += part_stride
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def quantise_part(
    x,
    source,
    values,
    scales,
    rows,
    columns,
    x_stride,
    part_stride,
    row_part,
    column_part,
    PICKED: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
):
    """Row r of the result is row source[r] (r itself unless PICKED) of x, or silu(left half) * right half of it.

    With PARTS, x is the sum of so many tensors part_stride elements apart, added in order.
    """
    row = (row_part * R + tl.arange(0, R)).to(tl.int64)
    group = column_part * G + tl.arange(0, G)
    column = group[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    live = row < rows
    mask = live[:, None, None] & (column < columns)
    here = tl.load(source + row, mask=live, other=0).to(tl.int64) if PICKED else row
    at = x + here[:, None, None] * x_stride + column
    value = load_sum(at, part_stride, mask, PARTS)
    if GATED:
        value = value / (1.0 + tl.exp(-value)) * load_sum(at + columns, part_stride, mask, PARTS)
    store_quantised(
        value,
        values + row[:, None, None] * columns + column,
        scales + group[None, :] * rows + row[:, None],
        mask,
        live[:, None] & (group * 128 < columns)[None, :],
    )


@triton.jit
def quantise_kernel(
    x,
    source,
    values,
    scales,
    rows,
    columns,
    x_stride,
    part_stride,
    PICKED: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(OVERLAP, EARLY)
    here = (tl.program_id(0), tl.program_id(1))
    sizes = (rows, columns, x_stride, part_stride)
    quantise_part(x, source, values, scales, *sizes, here[0], here[1], PICKED, GATED, PARTS, R, G)


@triton.jit
def norm_quantise_kernel(
    x,
    weight,
    normed,
    values,
    scales,
    rows,
    columns,
    x_stride,
    eps,
    CHUNKS: tl.constexpr,
    G: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row: RMS norm, the normed row in x's dtype, and the same row quantised."""
    wait_for_inputs(OVERLAP, EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G)
    column = group[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    parts: tl.tuple = ()
    gains: tl.tuple = ()
    for chunk in tl.static_range(CHUNKS):
        here = chunk * (G * 128) + column
        parts = parts + (tl.load(x + row * x_stride + here, mask=here < columns, other=0.0).to(tl.float32),)
        gains = gains + (tl.load(weight + here, mask=here < columns, other=0.0).to(tl.float32),)
    squares = parts[0] * parts[0]
    for chunk in tl.static_range(1, CHUNKS):
        squares += parts[chunk] * parts[chunk]
    factor = tl.rsqrt(tl.sum(tl.reshape(squares, [G * 128]), 0) / columns + eps)
    for chunk in tl.static_range(CHUNKS):
        here = chunk * (G * 128) + column
        value = (parts[chunk] * factor).to(normed.dtype.element_ty).to(tl.float32)
        value = (gains[chunk] * value).to(normed.dtype.element_ty)
        tl.store(normed + row * columns + here, value, mask=here < columns)
        block = chunk * G + group
        store_quantised(
            value.to(tl.float32),
            values + row * columns + here,
            (scales + block * rows + row)[None],
            here < columns,
            (block * 128 < columns)[None],
        )


@triton.jit
def add_parts_kernel(
    parts, out, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(OVERLAP, EARLY)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = element < numel
    at = parts + element
    total = tl.load(at, mask=live, other=0.0)
    for _ in tl.static_range(1, PARTS):
        at += numel
        total += tl.load(at, mask=live, other=0.0)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=live)


def empty_rows(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Values [rows, columns] and scales in memory order [blocks, rows], not yet written."""
    return (
        x.new_empty(rows, columns, dtype=torch.float8_e4m3fn),
        x.new_empty(-(-columns // BLOCK), rows, dtype=torch.float32),
    )


@torch.library.custom_op("cptools::quantise_rows", mutates_args=())
def quantise(x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """x [T, D], or [T, 2 * D] if gated, with dense rows -> values [T, D] and their scales transposed.

    x may be [P, T, ...], contiguous: then its sum over P is what is quantised.
    """
    rows = x.shape[-2]
    columns = x.shape[-1] // 2 if gated else x.shape[-1]
    values, scales = empty_rows(x, rows, columns)
    if rows and columns:
        tile = tiles(rows)
        quantise_kernel[(triton.cdiv(rows, tile["R"]), triton.cdiv(scales.shape[0], tile["G"]))](
            x,
            None,
            values,
            scales,
            rows,
            columns,
            x.stride(-2),
            x.stride(0),
            PICKED=False,
            GATED=gated,
            PARTS=x.shape[0] if x.dim() == 3 else 1,
            **tile,
            **overlapped(x, early=True),
            num_warps=_WARPS,
        )
    return values, scales


@quantise.register_fake
def _(x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(x, x.shape[-2], x.shape[-1] // 2 if gated else x.shape[-1])


@torch.library.custom_op("cptools::rms_norm_quantise", mutates_args=())
def rms_norm_quantise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] with dense rows -> normed [T, D] in x's dtype, its values and scales as from `quantise`."""
    rows, columns = x.shape
    normed = x.new_empty(rows, columns)
    values, scales = empty_rows(x, rows, columns)
    if rows and columns:
        norm_quantise_kernel[(rows,)](
            x,
            weight,
            normed,
            values,
            scales,
            rows,
            columns,
            x.stride(0),
            eps,
            CHUNKS=triton.cdiv(scales.shape[0], _NORM_BLOCKS),
            G=_NORM_BLOCKS,
            **overlapped(x, early=True),
            num_warps=_NORM_WARPS,
        )
    return normed, values, scales


@rms_norm_quantise.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return (x.new_empty(x.shape), *empty_rows(x, *x.shape))


def add_parts(parts: Tensor, out: Tensor) -> None:
    """The sum over dim 0 of parts [P, T, O] fp32, in order, into out [T, O]."""
    block = 256 if out.numel() <= 1 << 18 else 1024
    add_parts_kernel[(triton.cdiv(out.numel(), block),)](
        parts,
        out,
        out.numel(),
        PARTS=parts.shape[0],
        BLOCK=block,
        **overlapped(out, early=True),
        num_warps=block // 256,
    )


def tiles(rows: int) -> dict[str, int]:
    return {"R": 4, "G": 4} if rows > 4 else {"R": 1, "G": 4}


def compile_specs() -> list[CompileSpec]:
    specs = []
    for gated, rows, parts in ((False, 1, 1), (False, 8, 1), (True, 1, 8), (True, 8, 1)):
        constexprs = {
            "source": None,
            "PICKED": False,
            "GATED": gated,
            "PARTS": parts,
            "OVERLAP": True,
            "EARLY": True,
            **tiles(rows),
        }
        types = {"x": "*bf16" if parts == 1 else "*fp32", "values": "*fp8e4nv", "scales": "*fp32"}
        types |= dict.fromkeys(("rows", "columns", "x_stride", "part_stride"), "i32")
        specs.append(
            CompileSpec(
                name=f"quantise_{rows}{'_gated' if gated else ''}_of_{parts}",
                fn=quantise_kernel,
                signature={name: types.get(name, "constexpr") for name in quantise_kernel.arg_names},
                constexprs=constexprs,
                num_warps=_WARPS,
                divisible_by_16=("x", "values", "columns", "x_stride", "part_stride"),
            )
        )
    pointers = {"x": "*bf16", "weight": "*bf16", "normed": "*bf16", "values": "*fp8e4nv", "scales": "*fp32"}
    specs.append(
        CompileSpec(
            name="rms_norm_quantise_6144",
            fn=norm_quantise_kernel,
            signature={
                **pointers,
                **dict.fromkeys(("rows", "columns", "x_stride"), "i32"),
                "eps": "fp32",
                **dict.fromkeys(("CHUNKS", "G", "OVERLAP", "EARLY"), "constexpr"),
            },
            constexprs={"CHUNKS": 3, "G": _NORM_BLOCKS, "OVERLAP": True, "EARLY": True},
            num_warps=_NORM_WARPS,
            divisible_by_16=("x", "weight", "normed", "values", "columns", "x_stride"),
        )
    )
    for block in (256, 1024):
        constexprs = {"PARTS": 16, "BLOCK": block, "OVERLAP": True, "EARLY": True}
        signature = {"parts": "*fp32", "out": "*bf16", "numel": "i32", **dict.fromkeys(constexprs, "constexpr")}
        specs.append(
            CompileSpec(
                name=f"add_16_parts_{block}",
                fn=add_parts_kernel,
                signature=signature,
                constexprs=constexprs,
                num_warps=block // 256,
                divisible_by_16=("parts", "out", "numel"),
            )
        )
    return specs
