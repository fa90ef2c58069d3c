"""Three classic mistakes of context parallelism, each as a module to put in place of the right one.

Every one gives plausible numbers and no error, which is why a comparison with one rank is worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from cptools import CPPlan, LoadBalancedCPShard, LSEMerge, Partial, RoundRobinKVShard
from cptools.cp_plan import make_cp_plan
from models.glm53 import GLM53

KINDS = ("positions", "chunk", "lse")


def check_sabotage(kind: str, *, pcp: int, dcp: int, tokens: int, chunk: int) -> None:
    """ValueError where the broken module would do nothing wrong, or nothing at all."""
    if kind == "positions" and (pcp == 1 or min(tokens, chunk) == 1):
        raise ValueError(f"sabotage=positions needs pcp > 1 and steps of 2 tokens: {pcp=}, {tokens=}, {chunk=}")
    if kind == "chunk" and tokens <= chunk:
        raise ValueError(f"sabotage=chunk drops the second chunk, and there is one: {tokens=}, {chunk=}")
    if kind == "lse" and dcp == 1:
        raise ValueError("sabotage=lse breaks the merge over DCP ranks, which needs dcp > 1: dcp=1")


def sabotage(model: GLM53, kind: str, *, chunk: int) -> None:
    """Put the broken module `kind` of `KINDS` in the model. `chunk`: tokens of a prefill step. See `check_sabotage`."""
    if kind == "positions":
        model.cp = RankLocalPositions(group=model.cp.group, world_size=model.cp.world_size, rank=model.cp.rank)
    elif kind == "chunk":
        kv = model.kv
        model.kv = ForgetsSecondChunk(
            chunk, group=kv.group, world_size=kv.world_size, rank=kv.rank, page_size=kv.layout.page_size
        )
    elif kind == "lse":
        if model.merge is None:
            raise ValueError("there is no LSE merge to break with one DCP rank")
        model.merge = IgnoresWeights(group=model.merge.group, backend=model.merge.backend, scatter=model.merge.scatter)
    else:
        raise ValueError(f"sabotage={kind!r} must be one of {KINDS}")


class RankLocalPositions(LoadBalancedCPShard):
    """Numbers a rank's rows of a request 0, 1, 2, ... as if they were consecutive: RoPE and causal limits are wrong."""

    def plan(self, query_lens: Sequence[int] | Tensor, context_lens: Sequence[int] | Tensor | None = None) -> CPPlan:
        right = super().plan(query_lens, context_lens)
        positions = right.positions.clone()
        for request, context in enumerate(right.context_lens):
            own = right.request_ids == request
            positions[own] = context + torch.arange(int(own.sum()))
        values = {item.name: getattr(right, item.name) for item in fields(right)}
        return _RankLocalPlan(**{**values, "positions": positions, "kv_lens": positions + 1})


class _RankLocalPlan(CPPlan):
    def for_rank(self, rank: int) -> CPPlan:
        # Rows are still stored where they belong; only what a rank takes for its own positions is wrong.
        return make_cp_plan(
            self.query_lens, self.context_lens, world_size=self.world_size, rank=rank, strategy=self.strategy
        )


class ForgetsSecondChunk(RoundRobinKVShard):
    """Has no slot for the tokens of the second chunk: their rows are dropped, and memory that nobody wrote is read."""

    def __init__(self, chunk: int, **shard: object) -> None:
        super().__init__(**shard)  # type: ignore[arg-type]
        self.chunk = chunk

    def slot_mapping(self, positions: Tensor, request_ids: Tensor, block_tables: Tensor) -> Tensor:
        slots = super().slot_mapping(positions, request_ids, block_tables)
        return torch.where(positions // self.chunk == 1, -1, slots)


class IgnoresWeights(LSEMerge):
    """Averages the parts of decode attention instead of weighing each by its log-sum-exp."""

    def __call__(self, partial: Partial) -> Partial:
        return super().__call__(Partial(partial.out, torch.zeros_like(partial.lse)))
