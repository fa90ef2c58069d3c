"""A random checkpoint that exists nowhere: any rectangle of any of its tensors, computed where it is needed.

Each value is a hash of the seed, its tensor's name and its place there. So all cuts, devices and dtypes see one and the
same model, the same bits on CPU and GPU, and none of them needs more of it than its own part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cptools.kernels.block_fp8 import scale_shape

from ..config import GLM53Config
from .fill import MOST_VALUES
from .layout import Cut
from .released import Shape, expected_tensors, is_released_as_fp8, scale_name

# In each byte of a word: e4m3 with a random sign, mantissa and one of the exponents 2^-3 ... 2^0.
_KEPT_BITS, _SET_BITS = 0x9F9F9F9F - 2**32, 0x20202020
_FP8_RMS = math.sqrt(sum(4.0**-e for e in range(4)) / 4 * sum((1 + m / 8) ** 2 for m in range(8)) / 8)
# A sum of four bytes: close to normal, and exact in fp32.
_BYTES_MEAN, _BYTES_STD = 4 * 127.5, math.sqrt(4 * (256**2 - 1) / 12)
# Scales of blocks vary by (0.75 + 0.5 u) for u in [0, 1).
_SCALE_RMS = math.sqrt(0.75**2 + 0.75 * 0.5 + 0.5**2 / 3)


class RandomSource:
    """Tensors under released names, in released dtypes: block-FP8 where the config has a ``weight_block_size``.

    Matrices have a gain near one and norms weights near one. router_skew: standard deviation of the bias that selects
    experts, to be held against that of the router's probabilities, 0.2; 0 leaves routing near uniform.
    """

    def __init__(self, config: GLM53Config, *, seed: int, device: torch.device | str, router_skew: float = 0.0) -> None:
        if not 0 <= router_skew < math.inf:
            raise ValueError(f"router_skew={router_skew} is negative or not finite")
        self.config, self.seed, self.device, self.router_skew = config, seed, torch.device(device), router_skew
        self.shapes: dict[str, Shape] = {}
        self._values: dict[str, str] = {}  # of the name of scales
        for name, shape in expected_tensors(config).items():
            self.shapes[name] = shape
            if config.weight_block_size is not None and is_released_as_fp8(name, shape):
                self.shapes[scale_name(name)] = scale_shape(shape, config.weight_block_size)
                self._values[scale_name(name)] = name

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """This rectangle of a tensor or of the scales of one, in its stored dtype, on ``device``."""
        if name in self._values:
            return self._scales(name, start, shape)
        if scale_name(name) in self.shapes:
            return self._fp8(name, start, shape)
        value = self._words(name, start, shape)
        total = value.bitwise_and(0xFF)
        for shift in (8, 16, 24):
            total += value.bitwise_right_shift(shift).bitwise_and_(0xFF)
        normal = total.float().sub_(_BYTES_MEAN).mul_(1 / _BYTES_STD)
        if name.endswith("e_score_correction_bias"):
            return normal.mul_(self.router_skew)
        if name.endswith("bias"):
            normal.mul_(0.1)
        elif len(shape) == 1:
            normal.mul_(0.1).add_(1.0)
        elif name != "model.embed_tokens.weight":
            normal.mul_(self.shapes[name][-1] ** -0.5)
        return normal.to(torch.bfloat16)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all of them, a matrix before its scales, one at a time."""
        for name, shape in self.shapes.items():
            zeros = (0,) * len(shape)
            pieces = [self.read(c.name, c.start, c.shape) for c in Cut(name, zeros, shape, zeros).in_rows(MOST_VALUES)]
            yield name, torch.cat(pieces)

    def _fp8(self, name: str, start: Shape, shape: Shape) -> Tensor:
        rows, columns = shape
        first, last = start[1] // 4, -(-(start[1] + columns) // 4)
        words = self._words(name, (start[0], first), (rows, last - first), row_words=-(-self.shapes[name][1] // 4))
        values = words.bitwise_and_(_KEPT_BITS).bitwise_or_(_SET_BITS).view(torch.float8_e4m3fn)
        return values[:, start[1] - 4 * first :][:, :columns]

    def _scales(self, name: str, start: Shape, shape: Shape) -> Tensor:
        gain = self.shapes[self._values[name]][1] ** -0.5 / (_FP8_RMS * _SCALE_RMS)
        uniform = self._words(name, start, shape).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
        return uniform.mul_(0.5).add_(0.75).mul_(gain)

    def _words(self, name: str, start: Shape, shape: Shape, *, row_words: int | None = None) -> Tensor:
        """int32 of ``shape``: random bits for each place of a tensor whose rows have ``row_words`` words."""
        index = torch.arange(start[0], start[0] + shape[0], dtype=torch.int32, device=self.device)
        if len(shape) == 2:
            column = torch.arange(start[1], start[1] + shape[1], dtype=torch.int32, device=self.device)
            index = index.mul_(row_words or self.shapes[name][1]).unsqueeze(1) + column
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        keys = [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4)]
        return _mixed(index, keys[0], keys[1])


def _mixed(x: Tensor, first_key: int, second_key: int) -> Tensor:
    """x int32, overwritten: in place a bijection of 32 bits, another for each pair of keys. Products wrap around."""
    x.bitwise_xor_(first_key)
    for shift, factor, key in ((16, 0x7FEB352D, second_key), (15, 0x846CA68B - 2**32, first_key), (15, 0x2C1B3C6D, 0)):
        # A shift of a signed word fills with its sign: mask it.
        x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))
        x.mul_(factor).bitwise_xor_(key)
    return x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF))
