"""Products and reductions whose result for a row does not depend on the other rows, nor on how many there are.

A BLAS picks its kernel, and with it the order of summation, by the shape of the call. So on the CPU every product and
every reduction of a reference is made in tiles of exactly ``ROW_TILE`` rows, a short last tile padded with zeros. Other
devices compute the whole tensor at once and are held to tolerances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROW_TILE = 64
WIDTH_MULTIPLE = 16
_ALIGN = 64  # bytes; BLAS results may depend on the alignment of their operands


def pad_widths(x: Tensor, *dims: int) -> Tensor:
    """Zeros behind the given dims of x up to multiples of ``WIDTH_MULTIPLE``; x itself where nothing lacks.

    In a product of narrow matrices of odd width, MKL computes the last rows of a tile in another way than the others
    (seen with 2 to 11 outputs); the zeros add nothing to a sum.
    """
    shape = list(x.shape)
    for dim in dims:
        shape[dim] += -shape[dim] % WIDTH_MULTIPLE
    if shape == list(x.shape):
        return x
    padded = x.new_zeros(shape)
    padded[tuple(slice(size) for size in x.shape)] = x
    return padded


def in_tiles(x: Tensor, width: int, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Apply fn: [ROW_TILE, D] -> [ROW_TILE, width] over the rows of x [T, D]; result [T, width]."""
    if x.device.type != "cpu":
        return fn(x)
    x = x.contiguous()
    if x.data_ptr() % _ALIGN:
        x = x.clone()
    rows = x.shape[0]
    out = torch.empty(rows, width, dtype=dtype)
    whole = rows - rows % ROW_TILE
    for start in range(0, whole, ROW_TILE):
        out[start : start + ROW_TILE] = fn(x[start : start + ROW_TILE])
    if whole < rows:
        last = x.new_zeros(ROW_TILE, x.shape[1])
        last[: rows - whole] = x[whole:]
        out[whole:] = fn(last)[: rows - whole]
    return out


def tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] times weight [O, D] transposed -> [T, O] in x's dtype."""
    outputs = weight.shape[0]
    if x.device.type == "cpu":
        x, weight = pad_widths(x, 1), pad_widths(weight, 0, 1)
    return in_tiles(x, outputs, lambda tile: torch.mm(tile, weight.t())[:, :outputs], x.dtype)
