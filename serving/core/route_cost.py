"""What it takes an engine to serve a request, in seconds: where cached tokens, restores and queues compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum

import numpy as np

from cptools.integers import require_int


@dataclass(frozen=True)
class PrefillCost:
    """Seconds to prefill n new tokens behind c cached ones: per_request + n per_token + pairs per_pair.

    pairs = n c + n (n + 1) / 2: a query and a key that it may see. With sparse attention the indexer alone goes by
    pairs; projections, experts and attention to the top-k go by tokens.
    """

    per_token: float
    per_pair: float = 0.0
    per_request: float = 0.0

    def __post_init__(self) -> None:
        _require_amounts(self)

    def seconds(self, new: int, cached: int) -> float:
        return self.per_request + new * self.per_token + _pairs(new, cached) * self.per_pair if new > 0 else 0.0

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, float]]) -> PrefillCost:
        """From measured (new tokens, cached tokens, seconds): least squares of the relative errors.

        Raises ValueError if they do not tell tokens from pairs, or say that one of them gives time back.
        """
        samples = list(measured)
        if bad := [sample for sample in samples if sample[0] < 1 or sample[1] < 0 or not sample[2] > 0]:
            raise ValueError(f"samples {bad[:3]} are not (new >= 1, cached >= 0, seconds > 0)")
        rows = np.array([[new / s, _pairs(new, cached) / s] for new, cached, s in samples]).reshape(-1, 2)
        scale = np.abs(rows).max(axis=0, initial=1e-300)
        solution, _, rank, _ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
        per_token, per_pair = (float(x) for x in solution / scale)
        if rank < 2 or per_token < 0 or per_pair < 0:
            raise ValueError(
                f"{len(samples)} samples give rank {rank}, per_token={per_token:.3g}, per_pair={per_pair:.3g}; "
                "measure at several context lengths"
            )
        return cls(per_token, per_pair)


class Role(Enum):
    """What an engine does for a request: prompts, tokens, or all of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True)
class EngineProfile:
    """An engine's rates, as measured. A rate of inf costs nothing.

    prefill: None for a decode engine that computes no prompts at all.
    kv_bytes_per_token: what a cached token takes, over all ranks.
    host_bytes_per_second: from host memory back to the GPUs, all ranks together.
    transfer_bytes_per_second: what a decode engine pulls from a prefill engine.
    decode_tokens_per_second: cached tokens that its decode steps read, each step all contexts of the batch.
    max_requests: dispatched to it at once.
    """

    name: str
    role: Role = Role.BOTH
    prefill: PrefillCost | None = None
    kv_bytes_per_token: int = 0
    host_bytes_per_second: float = float("inf")
    transfer_bytes_per_second: float = float("inf")
    decode_tokens_per_second: float = float("inf")
    max_requests: int = 1 << 30

    def __post_init__(self) -> None:
        if self.prefill is None and self.role is not Role.DECODE:
            raise ValueError(f"engine {self.name!r} has the role {self.role.value}, and no prefill cost")
        require_int("kv_bytes_per_token", self.kv_bytes_per_token, minimum=0)
        require_int("max_requests", self.max_requests, minimum=1)
        for name in ("host_bytes_per_second", "transfer_bytes_per_second", "decode_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} of engine {self.name!r} must be positive")


@dataclass(frozen=True)
class EngineCost:
    """The price of a request on one engine, and what it is made of.

    cached_tokens, host_tokens: of the prompt's prefix there, and those of them that are in host memory only.
    remote_seconds: of a decode engine that pulls: all that the cheapest prefill engine costs.
    others_seconds: for what comes behind this work and waits for it.
    sure: False while events of the engine are missing.
    """

    engine: str
    cached_tokens: int
    host_tokens: int
    new_tokens: int
    prefill_seconds: float = 0.0
    remote_seconds: float = 0.0
    restore_seconds: float = 0.0
    transfer_seconds: float = 0.0
    decode_seconds: float = 0.0
    queue_seconds: float = 0.0
    others_seconds: float = 0.0
    affinity_seconds: float = 0.0
    sure: bool = True

    @property
    def seconds(self) -> float:
        """The sum, less the bonus of affinity."""
        own = self.prefill_seconds + self.restore_seconds + self.transfer_seconds + self.decode_seconds
        return own + self.remote_seconds + self.queue_seconds + self.others_seconds - self.affinity_seconds

    def __str__(self) -> str:
        parts = {
            "prefill": self.prefill_seconds,
            "remote": self.remote_seconds,
            "restore": self.restore_seconds,
            "transfer": self.transfer_seconds,
            "decode": self.decode_seconds,
            "queue": self.queue_seconds,
            "others": self.others_seconds,
            "affinity": -self.affinity_seconds,
        }
        terms = " ".join(f"{name} {value:.3f}" for name, value in parts.items() if value) or "nothing to do"
        where = f"{self.cached_tokens} cached ({self.host_tokens} in host memory), {self.new_tokens} new"
        return f"{self.engine}: {self.seconds:.3f} s = {terms}; {where}{'' if self.sure else '; events missing'}"


def _pairs(new: int, cached: int) -> int:
    return new * cached + new * (new + 1) // 2


def _require_amounts(cost: PrefillCost) -> None:
    for field in fields(cost):
        value = getattr(cost, field.name)
        if not 0 <= value < float("inf"):
            raise ValueError(f"{field.name}={value} must be finite and not negative")
