"""Which rank caches a token, and at which place: the arithmetic of decode context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from cptools.integers import require_int

_TORCH_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_Value = TypeVar("_Value")
Ints = TypeVar("Ints", int, npt.NDArray[np.int32], npt.NDArray[np.int64], torch.Tensor)


def _integers(name: str, value: _Value) -> _Value:
    """The value, if it is of integers: a number >= 0, or an array, widened to int64 so that no product wraps."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return cast(_Value, value.astype(np.int64, copy=False))
    if isinstance(value, torch.Tensor) and value.dtype in _TORCH_INTEGERS:
        return cast(_Value, value.long())
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} must be integers, got {getattr(value, 'dtype', value)!r}")
    if value < 0:
        raise ValueError(f"{name}={value} is negative")
    return value


@dataclass(frozen=True)
class KVLayout:
    """Round robin placement of the cached tokens of a sequence over `world_size` ranks.

    Blocks of `interleave` consecutive positions go to the ranks in turn; each rank keeps its tokens in position order::

        world_size=2, interleave=2      position  0 1 2 3 4 5 6 7 8
                                        rank      0 0 1 1 0 0 1 1 0
                                        local     0 1 0 1 2 3 2 3 4

    On every rank, page k of a sequence holds `page_size` local rows: together they are virtual block k, the positions
    [k * virtual_block, (k + 1) * virtual_block), so that one block table serves all ranks. The page size never changes
    a local index.

    All methods are local, without communication, and pure integer arithmetic. Each takes Python ints, numpy arrays or
    torch tensors of integers (any shape; two arguments broadcast) and returns the same kind, arrays as int64. A Python
    int out of range raises ValueError, so do floats and masks. The elements of arrays are not looked at: mask `-1` and
    the like before.
    The scheme is that of vLLM's decode context parallelism (`cp_kv_cache_interleave_size`).

    Args:
        world_size: ranks N over which one copy of the KV is split, >= 1.
        interleave: consecutive positions I that stay together, >= 1; divides `page_size`.
        page_size: rows of a page on one rank, >= 1.

    Raises:
        ValueError: a size is not a Python int >= 1, or `interleave` does not divide `page_size`.
    """

    world_size: int
    interleave: int = 1
    page_size: int = 64

    def __post_init__(self) -> None:
        for name in ("world_size", "interleave", "page_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, require_int(name, value, minimum=1))
        if self.page_size % self.interleave:
            raise ValueError(f"interleave={self.interleave} must divide page_size={self.page_size}")

    @property
    def virtual_block(self) -> int:
        """Consecutive positions that one entry of a block table covers: page_size * world_size."""
        return self.page_size * self.world_size

    def owner(self, position: Ints) -> Ints:
        """Rank that caches the token at `position`."""
        position = _integers("position", position)
        return position // self.interleave % self.world_size

    def local_index(self, position: Ints) -> Ints:
        """Index of the token at `position` among the tokens of its owner. Inverse, with the owner: `position`."""
        position = _integers("position", position)
        span = self.world_size * self.interleave
        return position // span * self.interleave + position % self.interleave

    def position(self, rank: Ints | int, local_index: Ints | int) -> Ints:
        """Position of the token that `rank` keeps at `local_index`: position(owner(t), local_index(t)) == t."""
        rank, local_index = self._checked_rank(rank), _integers("local_index", local_index)
        span = self.world_size * self.interleave
        block, offset = local_index // self.interleave, local_index % self.interleave
        return cast(Ints, block * span + rank * self.interleave + offset)  # type: ignore[redundant-cast]

    def local_len(self, seq_len: Ints | int, rank: Ints | int) -> Ints:
        """Number of the positions [0, seq_len) that `rank` owns."""
        rank, seq_len = self._checked_rank(rank), _integers("seq_len", seq_len)
        span = self.world_size * self.interleave
        beyond = seq_len % span - rank * self.interleave
        tail = min(max(beyond, 0), self.interleave) if isinstance(beyond, int) else beyond.clip(0, self.interleave)
        return cast(Ints, seq_len // span * self.interleave + tail)  # type: ignore[redundant-cast]

    def pages(self, seq_len: Ints) -> Ints:
        """Pages that a sequence needs on each rank, ceil(seq_len / virtual_block): the width of its block table."""
        seq_len = _integers("seq_len", seq_len)
        return -(-seq_len // self.virtual_block)

    def _checked_rank(self, rank: Ints | int) -> Ints | int:
        if isinstance(rank, (int, np.integer)) and not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside world_size={self.world_size}")
        return _integers("rank", rank)
