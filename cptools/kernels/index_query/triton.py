"""Rotate, quantise and fold the scale into the weight: a program takes a few heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import FP8
from ..compile_spec import CompileSpec
from ..norm_rope_store.triton import EXACT, quantize, rotate

_ROWS = 8


@triton.jit
def fp8_query_kernel(
    query,
    weights,
    cos,
    sin,
    out,
    scaled,
    rows,
    heads,
    token_stride,
    head_stride,
    weight_stride,
    angle_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    token, head = row // heads, row % heads
    at = tl.arange(0, BLOCK)[None, :]
    mask = live[:, None] & (at < DIM)
    x = tl.load(query + (token * token_stride + head * head_stride)[:, None] + at, mask=mask, other=0.0)
    weight = tl.load(weights + token * weight_stride + head, mask=live, other=0.0).to(tl.float32)
    if ROTATED > 0:
        x = rotate(x, cos, sin, token, live, angle_stride, BLOCK // 2, ROTATED)
    values, scale = quantize(tl.reshape(x.to(tl.float32), [1, ROWS, BLOCK]), True)
    values = tl.reshape(values, [ROWS, BLOCK]).to(tl.float8e4nv)
    tl.store(out + row[:, None] * DIM + at, values, mask=mask)
    tl.store(scaled + row, weight * tl.reshape(scale, [ROWS]), mask=live)


@torch.library.custom_op("cptools::fp8_query", mutates_args=())
def fp8_query(query: Tensor, weights: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """query [T, H, D], dense in D, weights [T, H], dense in H -> (e4m3 [T, H, D], float32 [T, H])."""
    tokens, heads, dim = query.shape
    out = torch.empty(tokens, heads, dim, dtype=FP8, device=query.device)
    scaled = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    rows = tokens * heads
    if rows:
        fp8_query_kernel[(triton.cdiv(rows, _ROWS),)](
            query,
            weights,
            query if cos is None else cos,
            query if sin is None else sin,
            out,
            scaled,
            rows,
            heads,
            query.stride(0),
            query.stride(1),
            weights.stride(0),
            0 if cos is None else cos.stride(0),
            DIM=dim,
            BLOCK=max(2, triton.next_power_of_2(dim)),
            ROTATED=0 if cos is None else cos.shape[1],
            ROWS=_ROWS,
            num_warps=4,
            **EXACT,
        )
    return out, scaled


@fp8_query.register_fake
def _(query: Tensor, weights: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape, dtype=FP8), query.new_empty(query.shape[:2], dtype=torch.float32)


def compile_specs() -> list[CompileSpec]:
    constexprs = {"DIM": 128, "BLOCK": 128, "ROTATED": 32, "ROWS": _ROWS}
    pointers = {"query": "*bf16", "weights": "*fp32", "cos": "*fp32", "sin": "*fp32", "out": "*fp8e4nv"}
    strides = ["rows", "heads", "token_stride", "head_stride", "weight_stride", "angle_stride"]
    return [
        CompileSpec(
            "fp8_query-128",
            fp8_query_kernel,
            pointers | {"scaled": "*fp32"} | dict.fromkeys(strides, "i32") | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            options=EXACT,
            divisible_by_16=(*pointers, "scaled", "heads", "token_stride", "head_stride", "weight_stride"),
        )
    ]
