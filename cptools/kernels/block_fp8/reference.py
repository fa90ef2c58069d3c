"""Rows of activations in FP8 and their products with block-FP8 matrices, in plain torch: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..row_tiles import tiled_product
from .matrix import BLOCK, FP8_MAX, BlockFP8

MIN_AMAX = 1e-12  # of 128 columns; below, all of them round to zero


class QuantisedRows(NamedTuple):
    """Rows [T, D] in FP8 with one scale for each 128 columns of a row; the last columns may be fewer.

    values: float8_e4m3fn [T, D]. scales: float32 [T, ceil(D / 128)] with strides (1, T), as scaled_mm reads them.
    """

    values: Tensor
    scales: Tensor

    def dequantise(self) -> Tensor:
        """fp32 [T, D]."""
        return self.values.float() * self.scales.repeat_interleave(BLOCK, 1)[:, : self.values.shape[1]]


def quantise_rows(x: Tensor) -> QuantisedRows:
    """x [T, D] of any float dtype; scale = amax * (1 / 448), value = x * (1 / scale) rounded to e4m3, all in fp32."""
    rows, columns = x.shape
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales = padded.abs().amax(2).clamp(min=MIN_AMAX) * (1 / FP8_MAX)
    values = (padded * (1.0 / scales).unsqueeze(2)).to(torch.float8_e4m3fn)
    return QuantisedRows(values.flatten(1)[:, :columns].contiguous(), scales.t().contiguous().t())


def product(x: QuantisedRows, weight: BlockFP8, out_dtype: torch.dtype) -> Tensor:
    """x [T, D] times weight [O, D] transposed -> [T, O]; fp32 products and sums, rounded once."""
    return tiled_product(x.dequantise(), weight.dequantise()).to(out_dtype)
