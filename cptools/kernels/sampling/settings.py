"""How requests choose their tokens: settings of one request, and the same of many rows as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ...host_copy import to_device
from ...integers import require_int
from ..arguments import ANY, check_one_device, check_tensor


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens.

    Args:
        temperature: >= 0; 0 takes the most likely token (greedy), and the rest says nothing then.
        top_k: only the k most likely tokens; 0 takes all.
        top_p: only the fewest most likely tokens that have at least this probability together, 0 < top_p <= 1; 1 takes
            all. After temperature and top_k.
        seed, request: which random numbers are drawn; `request` tells apart those that share a seed, 0 <= seed < 2^63
            and 0 <= request < 2^32. With the position of a token they fix its draw, whatever else is in the batch.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    request: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), Real):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be finite and >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        for name, bits in (("top_k", 63), ("seed", 63), ("request", 32)):
            if require_int(name, getattr(self, name), minimum=0) >= 2**bits:
                raise ValueError(f"{name}={getattr(self, name)} must be below 2^{bits}")


_COLUMNS = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "seed": torch.int64,
    "request": torch.int64,
}


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """`Sampling` of T rows, tensors [T] on one device, and what the host knows of all of them.

    Raises ValueError where the tensors do not fit together.

    The two flags choose the work that is done, so a captured graph serves rows with flags as at its capture: `greedy`
    rows read logits only, and without `truncated` no row is sorted.
    """

    temperature: Tensor  # float32
    top_k: Tensor  # int64
    top_p: Tensor  # float32
    seed: Tensor  # int64
    request: Tensor  # int64
    greedy: bool
    """Every row has temperature 0."""
    truncated: bool
    """Some row that is not greedy has top_k > 0 or top_p < 1."""

    def __post_init__(self) -> None:
        op, shape = "SamplingRows", (ANY,) if self.temperature.dim() != 1 else self.temperature.shape
        for name, dtype in _COLUMNS.items():
            check_tensor(op, name, getattr(self, name), (dtype,), shape)
        check_one_device(op, **{name: getattr(self, name) for name in _COLUMNS})

    @classmethod
    def of(cls, settings: Sequence[Sampling], device: torch.device | str = "cpu") -> SamplingRows:
        """One row a setting. Local, no sync. Raises ValueError on what is no `Sampling`."""
        if wrong := [s for s in settings if not isinstance(s, Sampling)]:
            raise ValueError(f"sampling settings must be Sampling, got {wrong[0]!r}")
        drawing = [s for s in settings if s.temperature > 0]
        columns = {
            name: to_device(torch.tensor([getattr(s, name) for s in settings], dtype=dtype), device)
            for name, dtype in _COLUMNS.items()
        }
        return cls(
            **columns,
            greedy=not drawing,
            truncated=any(s.top_k > 0 or s.top_p < 1 for s in drawing),
        )

    def __len__(self) -> int:
        return self.temperature.shape[0]

    def repeat(self, times: int) -> SamplingRows:
        """Each row `times` times in a row: [T * times]."""

        def spread(column: Tensor) -> Tensor:
            return column.unsqueeze(1).expand(-1, times).flatten()

        return SamplingRows(
            spread(self.temperature),
            spread(self.top_k),
            spread(self.top_p),
            spread(self.seed),
            spread(self.request),
            greedy=self.greedy,
            truncated=self.truncated,
        )
