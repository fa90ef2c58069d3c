"""Block-FP8 matrices: e4m3 values, and one fp32 scale per block of rows and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns that share a scale in a `BlockFP8`, and columns that do in a row of activations."""
FP8_MAX = 448.0  # largest e4m3 value


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
    scale = amax.clamp(min=1e-12) / FP8_MAX
    # Rounding of the quotient may pass the largest e4m3 value, and the cast does not saturate everywhere.
    quotient = (weight.float() / _spread(scale, weight.shape, block)).clamp(-FP8_MAX, FP8_MAX)
    return quotient.to(torch.float8_e4m3fn), scale


def dequantise_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """e4m3 [..., out, in] and its scales -> the fp32 matrices they stand for."""
    return weight.float() * _spread(scale, weight.shape, block)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


@dataclass(frozen=True, eq=False)
class BlockFP8:
    """A matrix [O, D] kept in FP8, or a stack of them [E, O, D]: the value of an element is value * scale of its block.

    values: float8_e4m3fn [..., O, D]. scales: float32 [..., ceil(O / 128), ceil(D / 128)]; the last blocks may be
    partial. Parts are views; they begin at a multiple of 128 and end at one or at the end of the matrix, since a scale
    belongs to a whole block.
    """

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
            raise ValueError(f"values, scales must be float8_e4m3fn, float32, got {values.dtype}, {scales.dtype}")
        if values.dim() not in (2, 3):
            raise ValueError(f"values must be [O, D] or [E, O, D], got {list(values.shape)}")
        expected = [*values.shape[:-2], *scale_shape(tuple(values.shape[-2:]), (BLOCK, BLOCK))]
        if list(scales.shape) != expected:
            raise ValueError(f"scales of values {list(values.shape)} must be {expected}, got {list(scales.shape)}")
        if values.device != scales.device:
            raise ValueError(f"values are on {values.device}, scales on {scales.device}")

    @classmethod
    def quantise(cls, weight: Tensor) -> BlockFP8:
        """weight [O, D] or [E, O, D] of any float dtype; a block's largest magnitude becomes 448."""
        if weight.dim() == 2:
            return cls(*quantise_blocks(weight, (BLOCK, BLOCK)))
        parts = [quantise_blocks(matrix, (BLOCK, BLOCK)) for matrix in weight]
        return cls(torch.stack([values for values, _ in parts]), torch.stack([scales for _, scales in parts]))

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The plain tensor it stands for: products in fp32, rounded once."""
        return dequantise_blocks(self.values, self.scales, (BLOCK, BLOCK)).to(dtype)

    def __getitem__(self, experts: int | slice) -> BlockFP8:
        """One matrix of a stack, or a stack of some."""
        if self.values.dim() != 3:
            raise ValueError(f"a matrix {list(self.shape)} has no experts; see rows() and columns()")
        return BlockFP8(self.values[experts], self.scales[experts])

    def rows(self, start: int, stop: int) -> BlockFP8:
        """Output rows start..stop of each matrix."""
        return self._part(-2, start, stop)

    def columns(self, start: int, stop: int) -> BlockFP8:
        """Input columns start..stop of each matrix; the values keep the row stride of the whole."""
        return self._part(-1, start, stop)

    def _part(self, dim: int, start: int, stop: int) -> BlockFP8:
        size = self.shape[dim]
        if not 0 <= start <= stop <= size or start % BLOCK or (stop % BLOCK and stop != size):
            name = "rows" if dim == -2 else "columns"
            raise ValueError(f"{name} {start}..{stop} of {size} do not begin and end with blocks of {BLOCK}")
        first, blocks = start // BLOCK, math.ceil((stop - start) / BLOCK)
        return BlockFP8(self.values.narrow(dim, start, stop - start), self.scales.narrow(dim, first, blocks))

    def to(self, device: torch.device | str) -> BlockFP8:
        return BlockFP8(self.values.to(device), self.scales.to(device))
