"""Products with matrices kept in FP8 with one scale per 128 x 128 block, as GLM and DeepSeek release them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .matrix import BLOCK, BlockFP8, dequantise_blocks, quantise_blocks, scale_shape
from .reference import QuantisedRows, quantise_rows

__all__ = [
    "BLOCK",
    "BlockFP8",
    "QuantisedRows",
    "block_fp8_linear",
    "dequantise_blocks",
    "quantise_blocks",
    "quantise_rows",
    "scale_shape",
]


def block_fp8_linear(x: Tensor | QuantisedRows, weight: BlockFP8, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, D] times weight [O, D] transposed -> [T, O], both operands in e4m3, sums in fp32. Local, no sync.

    x is quantised here, 128 columns of a row to a scale, unless it comes as `QuantisedRows`. out_dtype: by default x's
    own, BF16 for `QuantisedRows`.
    """
    rows = x if isinstance(x, QuantisedRows) else quantise_rows(x)
    if rows.values.dim() != 2 or weight.values.dim() != 2 or rows.values.shape[1] != weight.shape[1]:
        raise ValueError(f"block_fp8_linear: rows {list(rows.values.shape)} do not fit a weight {list(weight.shape)}")
    default = torch.bfloat16 if isinstance(x, QuantisedRows) else x.dtype
    return reference.product(rows, weight, out_dtype or default)
