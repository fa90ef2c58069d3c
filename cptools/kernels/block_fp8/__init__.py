"""Products with matrices kept in FP8 with one scale per 128 x 128 block, as GLM and DeepSeek release them.

Activations are quantised as they come, 128 columns of a row to a scale, alone or by the operation that makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import is_aligned
from ..impl import Choice, choose, triton_obstacle
from . import reference
from .matrix import BLOCK, BlockFP8, dequantise_blocks, quantise_blocks, scale_shape
from .reference import QuantisedRows

__all__ = [
    "BLOCK",
    "BlockFP8",
    "QuantisedRows",
    "block_fp8_linear",
    "choose_block_fp8_linear",
    "choose_quantise_rows",
    "dequantise_blocks",
    "quantise_blocks",
    "quantise_rows",
    "scale_shape",
]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FEW_ROWS = 128  # up to which splitting the depth pays


def quantise_rows(x: Tensor, *, impl: str = "auto") -> QuantisedRows:
    """x [T, D] of any float dtype in e4m3: scale = amax * (1 / 448) of 128 columns, value = x * (1 / scale), rounded.

    The kernel gives the reference's bits. NaN and infinities give NaN. Local, no sync, capturable.
    """
    if x.dim() != 2:
        raise ValueError(f"quantise_rows: rows must be [T, D], got {list(x.shape)}")
    if choose_quantise_rows(x, impl=impl).impl == "triton":
        from . import triton

        values, scales = triton.quantise(x, False)
        return QuantisedRows(values, scales.t())
    return reference.quantise_rows(x)


def choose_quantise_rows(x: Tensor, *, impl: str = "auto") -> Choice:
    """What `quantise_rows` would run, and why nothing faster."""
    obstacle = triton_obstacle(x.device)
    if obstacle is None and x.dtype not in _FLOATS:
        obstacle = f"rows are {x.dtype}, not BF16, FP16 or FP32"
    if obstacle is None and x.shape[1] > 1 and x.stride(1) != 1:
        obstacle = f"the columns of a row are {x.stride(1)} elements apart"
    return choose("quantise_rows", impl, {"triton": obstacle})


def block_fp8_linear(
    x: Tensor | QuantisedRows, weight: BlockFP8, *, out_dtype: torch.dtype | None = None, impl: str = "auto"
) -> Tensor:
    """x [T, D] times weight [O, D] transposed -> [T, O], both operands in e4m3, sums in fp32.

    Local, no sync, may be captured in a CUDA graph. x is quantised here unless it comes as `QuantisedRows`.
    out_dtype: by default x's own, BF16 for `QuantisedRows`.
    impl: "auto" | "reference" | "gluon" | "scaled_mm" (torch's own); `choose_block_fp8_linear` says what would run.
    """
    shape = x.values.shape if isinstance(x, QuantisedRows) else x.shape
    if len(shape) != 2 or weight.values.dim() != 2 or shape[1] != weight.shape[1]:
        raise ValueError(f"block_fp8_linear: rows {list(shape)} do not fit a weight {list(weight.shape)}")
    rows = x if isinstance(x, QuantisedRows) else quantise_rows(x)
    dtype = out_dtype or (torch.bfloat16 if isinstance(x, QuantisedRows) else x.dtype)
    chosen = choose_block_fp8_linear(rows, weight, out_dtype=dtype, impl=impl).impl
    if chosen == "scaled_mm":
        recipes = torch.nn.functional.ScalingType
        product: Tensor = torch.nn.functional.scaled_mm(
            rows.values,
            weight.values.t(),
            rows.scales,
            recipes.BlockWise1x128,
            weight.scales.t(),
            recipes.BlockWise128x128,
            output_dtype=dtype,
        )
        return product
    if chosen == "gluon":
        from . import gluon

        out: Tensor = gluon.linear(rows.values, rows.scales.t(), weight.values, weight.scales, dtype)
        return out
    return reference.product(rows, weight, dtype)


def choose_block_fp8_linear(
    x: Tensor | QuantisedRows, weight: BlockFP8, *, out_dtype: torch.dtype | None = None, impl: str = "auto"
) -> Choice:
    """What `block_fp8_linear` would run, and why nothing faster."""
    tensors = [weight.values, weight.scales]
    if isinstance(x, QuantisedRows):
        tensors += [x.values, x.scales.t()]
        dtype = out_dtype or torch.bfloat16
        rows = x.values.shape[0]
    else:
        dtype = out_dtype or x.dtype
        rows = x.shape[0]
    outputs, columns = weight.shape[-2:]
    gluon = triton_obstacle(weight.device)
    if gluon is None and columns % BLOCK:
        gluon = f"rows are {columns} wide, not a multiple of {BLOCK}"
    if gluon is None and any(not t.is_contiguous() or not is_aligned(t, 16) for t in tensors):
        gluon = "rows or matrix are strided or not aligned to 16 bytes"
    scaled_mm = gluon
    if scaled_mm is None and not hasattr(torch.nn.functional, "scaled_mm"):
        scaled_mm = "this torch has no scaled_mm"
    if scaled_mm is None and (rows % 4 or columns % 512 or outputs % 16):
        scaled_mm = f"{rows} rows, {columns} columns, {outputs} outputs are not multiples of 4, 512, 16"
    if scaled_mm is None and dtype != torch.bfloat16:
        scaled_mm = f"the result is {dtype}, not BF16"
    obstacles = {"gluon": gluon, "scaled_mm": scaled_mm}
    if rows > _FEW_ROWS:
        obstacles = {"scaled_mm": scaled_mm, "gluon": gluon}
    return choose("block_fp8_linear", impl, obstacles)
