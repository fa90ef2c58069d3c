"""What an engine asks of a model and of its cache, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cptools.block_tables import BlockTables
from cptools.cp_kv import ContextParallelKV
from cptools.kernels.sampling import SamplingRows, Verified
from cptools.step_rows import DecodeRows


class PagedCache(Protocol):
    """The cache of one engine, on one rank."""

    @property
    def kv(self) -> ContextParallelKV: ...
    @property
    def tables(self) -> BlockTables: ...
    @property
    def lengths(self) -> MutableMapping[int, int]:
        """Cached tokens of each open request."""

    def open(self, prefix: Sequence[int] = (), own: Sequence[int] = ()) -> int: ...
    def close(self, request: int) -> None: ...


Cache = TypeVar("Cache", bound=PagedCache, contravariant=True)
Result = TypeVar("Result")


class PagedModel(Protocol[Cache, Result]):
    """A model over paged rows. Every rank of an engine makes the same calls."""

    @property
    def device(self) -> torch.device: ...

    @property
    def max_positions(self) -> int:
        """Longest sequence."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""

    def check_engine(self, cache: Cache, draft_tokens: int) -> None:
        """ValueError unless steps can go over this cache and make so many drafts of a request, 0 for none. Local."""

    @property
    def capturable(self) -> bool:
        """Whether what decodes (`decode_hidden`, `logits`, `decode_round`) may be captured in a CUDA graph here."""

    @property
    def lockstep(self) -> bool:
        """Whether replicas of the engine share something and so make equally many passes: a step of prompts and a pass
        of decode rows in each step, also without any."""

    def checks(self) -> AbstractContextManager[None]:
        """For what may raise before the first pass of a step: replicas in lockstep learn of it instead of waiting."""

    def step(self, cache: Cache, *, prompts: Mapping[int, Sequence[int]]) -> Result:
        """Compute prompt tokens behind what is cached, and count them in the cache's lengths. All or nothing."""

    def last_logits(self, result: Result) -> Tensor:
        """float32 [R, vocab] of the last row of each prompt of a step, in their order."""

    def decode_hidden(self, cache: ContextParallelKV, rows: DecodeRows, ids: Tensor) -> Tensor:
        """Hidden states [T, D] of decode rows, ids int64 [T] on the device."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> float32 [T, vocab]."""

    def draft_prompts(
        self, result: Result, next_ids: Sequence[int], ending: Sequence[int], tokens: Tensor, draft_tokens: int
    ) -> Tensor:
        """Drafts int64 [E, k] behind the first tokens int64 [E] of prompts that end in a step, ``ending`` their places.

        next_ids: for each prompt token of the step, packed, the token that follows it; for the last one of an ending
        prompt any token. Called for every step of prompts, also where none ends. Only with k > 0.
        """

    def decode_round(
        self, cache: ContextParallelKV, rows: DecodeRows, ids: Tensor, sampling: SamplingRows
    ) -> tuple[Verified, Tensor, Tensor]:
        """A round of R requests with k drafts each: ids int64 [R, k + 1], the last token and its drafts, in as many
        rows a request -> what became of the drafts, new ones int64 [R, k], and the logits of the rows float32
        [R, k + 1, vocab]. Only with k > 0."""
