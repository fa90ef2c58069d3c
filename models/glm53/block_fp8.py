"""Block-FP8 matrices as released: e4m3 values, and one fp32 scale per block of rows and columns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def scale_name(weight_name: str) -> str:
    return weight_name + "_scale_inv"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Of a matrix [out, in]; the last blocks may be partial."""
    return tuple(math.ceil(size / side) for size, side in zip(shape, block, strict=True))


def quantise_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 [out, in] and fp32 scales [ceil(out / block[0]), ceil(in / block[1])], a block's amax / 448."""
    rows, columns = weight.shape
    scale_rows, scale_columns = scale_shape((rows, columns), block)
    padded = weight.new_zeros(scale_rows * block[0], scale_columns * block[1], dtype=torch.float32)
    padded[:rows, :columns] = weight
    amax = padded.view(scale_rows, block[0], scale_columns, block[1]).abs().amax(dim=(1, 3))
    scale = amax.clamp(min=1e-12) / _FP8_MAX
    # Rounding of the quotient may pass the largest e4m3 value, and the cast does not saturate everywhere.
    quotient = (weight.float() / _spread(scale, weight.shape, block)).clamp(-_FP8_MAX, _FP8_MAX)
    return quotient.to(torch.float8_e4m3fn), scale


def dequantise_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """e4m3 [out, in] and its scales -> the fp32 matrix they stand for."""
    return weight.float() * _spread(scale, weight.shape, block)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
