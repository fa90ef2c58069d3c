"""One step of an engine: which requests compute what, and the pages they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cptools.block_tables import BlockTables
from cptools.cp_kv import ContextParallelKV, KVStep
from cptools.step_plan import StepPlan, make_step_plan

from .config import GLM53Config

if TYPE_CHECKING:
    from .model import GLM53


@dataclass
class EngineCache:
    """Pages of one engine, who holds them, and how many tokens of each request are cached."""

    kv: ContextParallelKV
    tables: BlockTables
    lengths: dict[int, int] = field(default_factory=dict)

    def open(self) -> int:
        """A new request without tokens."""
        request = self.tables.open()
        self.lengths[request] = 0
        return request

    def close(self, request: int) -> None:
        """Give a request's pages back."""
        self.tables.close(request)
        del self.lengths[request]


@dataclass(frozen=True)
class StepResult:
    """What a step computed on this rank. ``hidden`` [local rows, hidden] after the final norm: this rank's prompt
    rows, then all decode rows; requests in the order of the two mappings given to the step."""

    plan: StepPlan
    kv: KVStep
    hidden: Tensor


def check_ids(config: GLM53Config, name: str, ids: Sequence[int], context: int) -> None:
    """ValueError unless ids are tokens that fit behind ``context`` positions."""
    if not ids:
        raise ValueError(f"{name} is empty")
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        raise ValueError(f"{name} has token ids in [{min(ids)}, {max(ids)}], the vocabulary has {config.vocab_size}")
    if context + len(ids) > config.max_position_embeddings:
        raise ValueError(
            f"{name} needs {context + len(ids)} positions ({context} and {len(ids)} new ones), "
            f"max_position_embeddings={config.max_position_embeddings}"
        )


def plan_step(
    model: GLM53, cache: EngineCache, prompts: Mapping[int, Sequence[int]], decodes: Mapping[int, Sequence[int]]
) -> tuple[StepPlan, list[int]]:
    """Reserve pages and plan a step: (plan, ids of the decode rows). All or nothing: an error changes no state."""
    if both := prompts.keys() & decodes.keys():
        raise ValueError(f"requests {sorted(both)} are given as prompts and as decodes")
    new_ids = {**prompts, **decodes}
    for request, ids in new_ids.items():
        if request not in cache.lengths:
            raise ValueError(f"request {request} is not open; open: {sorted(cache.lengths)}")
        check_ids(model.config, f"request {request}", ids, cache.lengths[request])
    cache.tables.reserve({request: cache.lengths[request] + len(ids) for request, ids in new_ids.items()})
    contexts = [cache.lengths[request] for request in prompts]
    plan = make_step_plan(
        model.cp.plan([len(ids) for ids in prompts.values()], contexts),
        cache.tables.table(list(prompts)),
        decode_context_lens=[cache.lengths[request] for request in decodes],
        decode_query_lens=[len(ids) for ids in decodes.values()],
        decode_tables=cache.tables.table(list(decodes)),
    )
    return plan, [token for ids in decodes.values() for token in ids]


def local_ids(model: GLM53, plan: StepPlan, prompt_ids: Sequence[int], decode_ids: Sequence[int]) -> Tensor:
    """int64 [local rows]: this rank's share of packed prompt ids, then the decode rows' ids."""
    packed = torch.tensor(prompt_ids, dtype=torch.int64, device=model.device)
    return torch.cat(
        [model.cp.shard(packed, plan.prompt), torch.tensor(decode_ids, dtype=torch.int64, device=model.device)]
    )
