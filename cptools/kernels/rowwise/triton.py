"""RMS norm and rotation of rows, one launch each. Roundings are those of the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_spec import CompileSpec
from ..norm_rope_store.triton import EXACT, rotate

_ROPE_ROWS = 16


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    tl.store(out + row * width + at, (w.to(tl.float32) * normed).to(values.dtype), mask=inside)


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    rows,
    heads,
    token_stride,
    head_stride,
    angle_stride,
    PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    token = row // heads
    at = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    mask = live[:, None] & (at < 2 * PAIRS)
    values = tl.load(x + (token * token_stride + row % heads * head_stride)[:, None] + at, mask=mask, other=0.0)
    turned = rotate(values, cos, sin, token, live, angle_stride, BLOCK_PAIRS, PAIRS)
    tl.store(out + row[:, None] * (2 * PAIRS) + at, turned, mask=mask)


@torch.library.custom_op("cptools::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D], dense in D -> [T, D] in its dtype."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows and width:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](x, weight, out, x.stride(0), width, eps, BLOCK=block, num_warps=warps_of(block))
    return out


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("cptools::rope_interleaved", mutates_args=())
def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], dense in D -> [T, H, D] contiguous."""
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    rows = tokens * heads
    if rows and width:
        rope_kernel[(triton.cdiv(rows, _ROPE_ROWS),)](
            x,
            cos,
            sin,
            out,
            rows,
            heads,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            PAIRS=width // 2,
            BLOCK_PAIRS=triton.next_power_of_2(width // 2),
            ROWS=_ROPE_ROWS,
            num_warps=4,
            **EXACT,
        )
    return out


@rope_interleaved.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def warps_of(block: int) -> int:
    """16 values a thread, which stay in registers."""
    return max(1, min(16, block // 512))


def compile_specs() -> list[CompileSpec]:
    specs = []
    for width in (512, 2048, 6144):
        block = triton.next_power_of_2(width)
        specs.append(
            CompileSpec(
                f"rms_norm-{width}",
                rms_norm_kernel,
                {
                    "x": "*bf16",
                    "weight": "*bf16",
                    "out": "*bf16",
                    "x_stride": "i32",
                    "width": "i32",
                    "eps": "fp32",
                    "BLOCK": "constexpr",
                },
                {"BLOCK": block},
                num_warps=warps_of(block),
                divisible_by_16=("x", "weight", "out", "x_stride", "width"),
            )
        )
    constexprs = {"PAIRS": 32, "BLOCK_PAIRS": 32, "ROWS": _ROPE_ROWS}
    specs.append(
        CompileSpec(
            "rope_interleaved-64",
            rope_kernel,
            {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16"}
            | dict.fromkeys(["rows", "heads", "token_stride", "head_stride", "angle_stride"], "i32")
            | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            options=EXACT,
            divisible_by_16=("x", "cos", "sin", "out", "token_stride", "head_stride", "angle_stride"),
        )
    )
    return specs
