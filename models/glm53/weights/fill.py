"""Allocating the weights of a rank and filling them cut by cut, whatever the values are read from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cptools.kernels.block_fp8 import BLOCK, BlockFP8

from .layout import Cut, Parameter
from .model_weights import Weight
from .released import Shape, scale_name

Read = Callable[[str, Shape, Shape], Tensor]
"""(released name, start, shape) -> these values in their stored dtype, on any device; scales have names too."""
MOST_VALUES = 8 * 2**20
"""Values read at once: bounds the copies in flight."""


_Made = TypeVar("_Made", Tensor, BlockFP8)


class Filling:
    """Makes the parameters of `assemble` on ``device``, uninitialised, and remembers what is to be read into them.

    dtype: of everything but what is always fp32, and of ``kept``: the released matrices that stay in FP8.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, kept: Collection[str] = ()) -> None:
        self.device, self.dtype, self.kept = device, dtype, kept
        self.places: list[tuple[Cut, Weight]] = []

    def tensor(self, parameter: Parameter) -> Tensor:
        dtype = torch.float32 if parameter.kind == "fp32" else self.dtype
        return self._remember(parameter, torch.empty(parameter.shape, dtype=dtype, device=self.device))

    def matrix(self, parameter: Parameter) -> Weight:
        if parameter.cuts[0].name not in self.kept:
            return self.tensor(parameter)
        values = torch.empty(parameter.shape, dtype=torch.float8_e4m3fn, device=self.device)
        shape = (*parameter.shape[:-2], *(-(-size // BLOCK) for size in parameter.shape[-2:]))
        return self._remember(parameter, BlockFP8(values, torch.empty(shape, device=self.device)))

    def _remember(self, parameter: Parameter, made: _Made) -> _Made:
        self.places += [(cut, made) for cut in parameter.cuts]
        return made


def fill(cut: Cut, into: Weight, read: Read, block: tuple[int, int] | None) -> None:
    """Read one cut into its place. FP8 values are dequantised where ``into`` is a plain tensor: fp32, rounded once.

    block: rows and columns to a scale, of FP8 matrices.
    """
    if isinstance(into, BlockFP8):
        scales = _scales_of(cut, (BLOCK, BLOCK))
        into.scales[scales.place].copy_(read(scales.name, scales.start, scales.shape))
        into = into.values
        block = None
    for rows in cut.in_rows(MOST_VALUES):
        value = read(rows.name, rows.start, rows.shape)
        if value.dtype == torch.float8_e4m3fn and block is not None:
            scales = _scales_of(rows, block)
            scale = read(scales.name, scales.start, scales.shape).to(into.device)
            value = value.to(into.device).float() * _spread(scale, rows, block)
        into[rows.place].copy_(value)


def _scales_of(cut: Cut, block: tuple[int, int]) -> Cut:
    """The scales that a cut of values needs."""
    first = tuple(start // side for start, side in zip(cut.start, block, strict=True))
    ends = (-(-(start + size) // side) for start, size, side in zip(cut.start, cut.shape, block, strict=True))
    at = tuple(place // side for place, side in zip(cut.at[-2:], block, strict=True))
    shape = tuple(end - start for start, end in zip(first, ends, strict=True))
    return Cut(scale_name(cut.name), first, shape, (*cut.at[:-2], *at))


def _spread(scale: Tensor, cut: Cut, block: Sequence[int]) -> Tensor:
    """Each scale over the values of the cut that it belongs to."""
    for dim, side in enumerate(block):
        first = cut.start[dim] % side
        scale = scale.repeat_interleave(side, dim).narrow(dim, first, cut.shape[dim])
    return scale
