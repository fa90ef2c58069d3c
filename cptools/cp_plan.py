"""Which rank computes which prompt token: the integers of prefill context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

_Int64 = npt.NDArray[np.int64]

_MAX_PAIRS = 2**62  # int64 counts them
STRATEGIES = ("zigzag", "interleave")


@dataclass(frozen=True)
class CPPlan:
    """One rank's share of the new prompt tokens of a step. Made by `make_cp_plan`; T tokens, R requests, W ranks.

    A rank's rows follow the requests of the batch and, within a request, its positions; nothing is padded. Two plans
    are equal when the arguments they were made from are. All index tensors are int64 on the CPU and must not be
    written to. Local, no communication.

    Attributes:
        world_size, rank: W and the rank whose rows these are.
        strategy: "zigzag" or "interleave".
        query_lens, context_lens: new and already cached tokens of each request.
        counts: rows of each of the W ranks; may be 0.
        pairs: sum of `kv_lens` of each of the W ranks, its causal (query, key) pairs.
        token_index: [counts[rank]] packed index of each local row.
        positions: [counts[rank]] absolute position of each local row in its sequence, context included.
        request_ids: [counts[rank]] request of each local row.
        kv_lens: [counts[rank]] = positions + 1, the keys that each row may see.
    """

    world_size: int
    rank: int
    strategy: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    counts: tuple[int, ...] = field(compare=False)
    pairs: tuple[int, ...] = field(compare=False)
    token_index: torch.Tensor = field(compare=False, repr=False)
    positions: torch.Tensor = field(compare=False, repr=False)
    request_ids: torch.Tensor = field(compare=False, repr=False)
    kv_lens: torch.Tensor = field(compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, the new tokens of all requests."""
        return sum(self.query_lens)

    def for_rank(self, rank: int) -> CPPlan:
        """The plan of the same step for another rank. Raises ValueError when there is no such rank."""
        if rank == self.rank:
            return self
        return make_cp_plan(
            self.query_lens, self.context_lens, world_size=self.world_size, rank=rank, strategy=self.strategy
        )

    @cached_property
    def restore_index(self) -> torch.Tensor:
        """int64 [T]: the rows of rank 0, 1, ... W-1 one after another, indexed by it, are in packed order."""
        lens = np.array(self.query_lens, dtype=np.int64)
        begin, length, stride = _segments(lens, self.world_size, self.strategy)
        first = begin + _exclusive_cumsum(lens)[:, None, None]
        restore = np.empty(self.num_tokens, dtype=np.int64)
        restore[_expand(first.swapaxes(0, 1), length.swapaxes(0, 1), stride)] = np.arange(len(restore))
        return torch.from_numpy(restore)


def make_cp_plan(
    query_lens: Sequence[int] | torch.Tensor,
    context_lens: Sequence[int] | torch.Tensor | None = None,
    *,
    world_size: int,
    rank: int,
    strategy: str = "zigzag",
) -> CPPlan:
    """Split the new tokens of a batch of prompts over `world_size` ranks so that all have about equal work.

    "zigzag" cuts the L new tokens of each request in 2W chunks whose lengths differ by at most one and gives rank r
    the chunks r and 2W-1-r, a cheap early and a costly late one::

        L=16, W=2    token  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
                     rank   0  0  0  0  1  1  1  1  1  1  1  1  0  0  0  0

    The L mod 2W tokens that remain are dealt to the ranks in turn, on from where the previous request stopped: over any
    batch max(counts) - min(counts) <= 1. For one request of at least 64 W tokens max(pairs) / mean(pairs) <= 1.02.
    "interleave" gives the packed token i to rank i mod W.

    Any length is legal: 0, fewer tokens than ranks, no request at all. Local, no communication.
    Zigzag is the usual cut of causal ring attention (Llama 3 training, zhuzilin/ring-flash-attention); the dealing of
    the remainder is this library's.

    Args:
        query_lens: [R] new tokens of each request, integers >= 0.
        context_lens: [R] tokens of each request that are cached already, default all 0. They shift the positions.
        world_size: W >= 1.
        rank: whose rows to plan, in [0, W).
        strategy: "zigzag" or "interleave".

    Raises:
        ValueError: lengths that are negative, not integers, not one-dimensional or not as many as requests; no such
            rank or strategy.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be >= 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is outside world_size={world_size}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {STRATEGIES}")
    lens = _as_lengths("query_lens", query_lens)
    context = np.zeros_like(lens) if context_lens is None else _as_lengths("context_lens", context_lens)
    if len(context) != len(lens):
        raise ValueError(f"{len(context)} context_lens for {len(lens)} query_lens")

    work = float((lens.astype(np.float64) * (context.astype(np.float64) + lens)).sum())
    if work > _MAX_PAIRS:
        raise ValueError(
            f"lengths up to {lens.max()} behind contexts up to {context.max()} make {work:.3g} causal pairs"
        )
    begin, length, stride = _segments(lens, world_size, strategy)
    # kv_lens within a segment: context + begin + 1, then on by stride.
    pairs = length * (context[:, None, None] + begin + 1) + stride * (length * (length - 1) // 2)

    request_start = _exclusive_cumsum(lens)
    token_index = _expand(begin[:, rank] + request_start[:, None], length[:, rank], stride)
    rows = length[:, rank].sum(axis=1)
    positions = token_index + (context - request_start).repeat(rows)
    return CPPlan(
        world_size=world_size,
        rank=rank,
        strategy=strategy,
        query_lens=tuple(lens.tolist()),
        context_lens=tuple(context.tolist()),
        counts=tuple(length.sum(axis=(0, 2)).tolist()),
        pairs=tuple(pairs.sum(axis=(0, 2)).tolist()),
        token_index=torch.from_numpy(token_index),
        positions=torch.from_numpy(positions),
        request_ids=torch.from_numpy(np.arange(len(lens)).repeat(rows)),
        kv_lens=torch.from_numpy(positions + 1),
    )


def _as_lengths(name: str, values: Sequence[int] | torch.Tensor) -> _Int64:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, not {array.dtype}")
    if array.max() > _MAX_PAIRS:
        raise ValueError(f"{name}[{int(array.argmax())}]={array.max()} is beyond 2^62")
    if array.min() < 0:
        worst = int(array.argmin())
        raise ValueError(f"{name}[{worst}]={array[worst]} is negative")
    return array.astype(np.int64)


def _exclusive_cumsum(values: _Int64) -> _Int64:
    return values.cumsum() - values


def _segments(lens: _Int64, world_size: int, strategy: str) -> tuple[_Int64, _Int64, int]:
    """Where each rank's tokens lie, as progressions: first offset in its request and length, both [R, W, S], stride."""
    if strategy == "zigzag":
        return *_zigzag_chunks(lens, world_size), 1
    lag = (np.arange(world_size) - _exclusive_cumsum(lens)[:, None]) % world_size
    length = (lens[:, None] - lag + world_size - 1) // world_size
    return lag[:, :, None], length[:, :, None], world_size


def _zigzag_chunks(lens: _Int64, world_size: int) -> tuple[_Int64, _Int64]:
    """Offset in its request and length of the two chunks of each rank, [R, W, 2]."""
    base = lens // (2 * world_size)
    rem = lens - base * (2 * world_size)
    turn = (np.arange(world_size) - _exclusive_cumsum(rem)[:, None]) % world_size
    extra = rem[:, None] // world_size + (turn < rem[:, None] % world_size)
    # A lone extra token costs about L pairs at the back, but r L / 2W at the front: at the front while few ranks have
    # one, at the back when the other ranks have one at both ends.
    at_front = (extra == 2) | ((extra == 1) & (rem[:, None] <= world_size))
    size = base[:, None] + np.concatenate((at_front, (extra - at_front)[:, ::-1]), axis=1)
    begin = size.cumsum(axis=1) - size
    return _pair_up(begin), _pair_up(size)


def _pair_up(chunks: _Int64) -> _Int64:
    """[R, 2W] chunks in position order -> [R, W, 2] front and back chunk of each rank."""
    half = chunks.shape[1] // 2
    return np.stack((chunks[:, :half], chunks[:, : half - 1 : -1]), axis=2)


def _expand(first: _Int64, length: _Int64, stride: int) -> _Int64:
    """Write out the progressions first, first + stride, ... of these lengths, one after another."""
    length = length.ravel()
    shift = first.ravel() - stride * _exclusive_cumsum(length)
    total = int(length.sum())
    return np.arange(0, stride * total, stride) + shift.repeat(length)
