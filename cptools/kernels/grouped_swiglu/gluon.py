"""SwiGLU feed-forward on Hopper. Grouped: three launches, tiles and rows in FP8, gate and up with SwiGLU, down.

Dense in FP8: the same without tiles, or with products split over their depth and added where rows are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..block_fp8.gluon import linear as block_fp8_linear
from ..block_fp8.gluon import parts_of
from ..block_fp8.triton import quantise
from ..compile_spec import CompileSpec
from .product_gluon import LAUNCH, Tiles, grouped_kernel, product
from .triton import prepare


@torch.library.custom_op("cptools::grouped_swiglu_fp8", mutates_args=())
def grouped_swiglu_fp8(
    x: Tensor,
    source: Tensor | None,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
) -> Tensor:
    """x [T, D] of any float dtype with dense rows, source [P] or None, weights [E, 2 * I, D], [E, D, I] -> [P, D]."""
    rows = x.shape[0] if source is None else source.shape[0]
    out = x.new_empty(rows, down.shape[1])
    if rows:
        table, total, most, values, scales = prepare(counts, x, source, quantise=True)
        tiles = Tiles(table, total, most)
        inner = x.new_empty(rows, down.shape[2], dtype=values.dtype)
        inner_scales = product(values, scales, gate_up, gate_up_scales, tiles, inner)
        product(inner, inner_scales, down, down_scales, tiles, out)
    return out


@grouped_swiglu_fp8.register_fake
def _(
    x: Tensor,
    source: Tensor | None,
    counts: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
) -> Tensor:
    return x.new_empty(x.shape[0] if source is None else source.shape[0], down.shape[1])


@torch.library.custom_op("cptools::grouped_swiglu_bf16", mutates_args=())
def grouped_swiglu_bf16(x: Tensor, source: Tensor | None, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `grouped_swiglu_fp8`, everything in BF16."""
    picked = x if source is None else x[source]
    out = x.new_empty(picked.shape[0], down.shape[1])
    if len(out):
        table, total, most, _, _ = prepare(counts, picked, None, quantise=False)
        tiles = Tiles(table, total, most)
        inner = x.new_empty(len(out), down.shape[2])
        product(picked, None, gate_up, None, tiles, inner)
        product(inner, None, down, None, tiles, out)
    return out


@grouped_swiglu_bf16.register_fake
def _(x: Tensor, source: Tensor | None, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] if source is None else source.shape[0], down.shape[1])


@torch.library.custom_op("cptools::dense_swiglu_fp8", mutates_args=())
def dense_swiglu_fp8(x: Tensor, gate_up: Tensor, gate_up_scales: Tensor, down: Tensor, down_scales: Tensor) -> Tensor:
    """x [T, D] of any float dtype with dense rows, weights [2 * I, D], [D, I] -> [T, D]."""
    rows, (outputs, width) = x.shape[0], down.shape
    if not rows:
        return x.new_empty(0, outputs)
    values, scales = quantise(x, False)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = parts_of(rows, 2 * width, x.shape[1] // 128, programs)
    if parts == 1:
        inner = torch.empty(rows, width, dtype=values.dtype, device=x.device)
        inner_scales = product(values, scales, gate_up, gate_up_scales, None, inner)
    else:
        sums = torch.empty(parts, rows, 2 * width, dtype=torch.float32, device=x.device)
        product(values, scales, gate_up, gate_up_scales, None, sums)
        inner, inner_scales = quantise(sums, True)
    out: Tensor = block_fp8_linear(inner, inner_scales, down, down_scales, x.dtype)
    return out


@dense_swiglu_fp8.register_fake
def _(x: Tensor, gate_up: Tensor, gate_up_scales: Tensor, down: Tensor, down_scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[0])


def compile_specs() -> list[CompileSpec]:
    specs = []
    for fp8, gated, dense, out in (
        *((True, True, False, "fp8e4nv"), (True, False, False, "bf16")),
        *((False, True, False, "bf16"), (False, False, False, "bf16")),
        *((True, True, True, "fp8e4nv"), (True, False, True, "bf16"), (True, False, True, "fp32")),
    ):
        dtype, wide, bits = ("fp8e4nv", 128, 8) if fp8 else ("bf16", 64, 16)
        layout = f"NVMMASharedLayout(128,{bits},2)"
        pointers = {"x": f"tensordesc<{dtype}[64,{wide}],{layout}>", "w": f"tensordesc<{dtype}[128,{wide}],{layout}>"}
        if fp8:
            pointers |= {"x_scales": "*fp32", "w_scales": "*fp32"}
        if fp8 and gated:
            pointers["out_scales"] = "*fp32"
        if not dense:
            pointers |= {"table": "*i32", "total": "*i32"}
        pointers["out"] = f"*{out}"
        integers = ("columns", "outputs", "steps", "parts", "rows", "x_scale_stride", "out_stride", "out_scale_stride")
        types = pointers | dict.fromkeys(integers, "i32")
        values = {"GATED": gated, "FP8": fp8, "DENSE": dense, **LAUNCH}
        signature = {name: types.get(name, "constexpr") for name in grouped_kernel.arg_names}
        divisible = ("x_scales", "w_scales", "out", "out_scales", "table", "outputs", "out_stride")
        specs.append(
            CompileSpec(
                name=f"{'dense' if dense else 'grouped'}_product_{dtype}{'_gated' if gated else ''}_to_{out}",
                fn=grouped_kernel,
                signature=signature,
                constexprs={name: values.get(name) for name, kind in signature.items() if kind == "constexpr"},
                gluon=True,
                divisible_by_16=tuple(name for name in divisible if name in types),
            )
        )
    return specs
