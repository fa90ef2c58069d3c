"""One step of an engine: which requests compute what, and the pages they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cptools.block_tables import BlockTables
from cptools.cp_kv import ContextParallelKV, KVStep
from cptools.host_copy import to_device
from cptools.integers import require_int
from cptools.step_plan import StepPlan, make_step_plan

from .config import GLM53Config
from .layer_split import StepSplit

if TYPE_CHECKING:
    from .model import GLM53


@dataclass
class EngineCache:
    """Pages of one engine, who holds them, and how many tokens of each request are cached."""

    kv: ContextParallelKV
    tables: BlockTables
    lengths: dict[int, int] = field(default_factory=dict)

    def open(self, prefix: Sequence[int] = (), own: Sequence[int] = ()) -> int:
        """A new request, without tokens, or with those whose rows are in the pages ``prefix``: whole virtual blocks.

        It takes over a user of each page, see `BlockTables.open`; new tokens go to ``own`` and other pages.
        """
        request = self.tables.open(prefix, own)
        self.lengths[request] = len(prefix) * self.tables.layout.virtual_block
        return request

    def truncate(self, request: int, length: int) -> None:
        """Forget a request's tokens from ``length`` on, as rejected drafts. Local.

        Its pages stay reserved: it is about to go on in them. The rows behind the length are never read, and written
        again before their positions count. Raises ValueError, changing nothing, for a request that is not open or a
        length outside [0, its length], or inside pages that are read-only.
        """
        if request not in self.lengths:
            raise ValueError(f"request {request} is not open; open: {sorted(self.lengths)}")
        held = self.lengths[request]
        if not 0 <= require_int("length", length) <= held:
            raise ValueError(f"request {request} has {held} tokens and can not be cut to {length}")
        if length < (read_only := self.tables.read_only_tokens(request)):
            raise ValueError(f"request {request} shares its first {read_only} tokens and can not be cut to {length}")
        layout, rank = self.kv.kv.layout, self.kv.kv.rank
        self.kv.traffic.rows_dropped += layout.local_len(held, rank) - layout.local_len(length, rank)
        self.lengths[request] = length

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
    split: StepSplit
    hidden: Tensor
    cache: EngineCache
    lengths: Mapping[int, int]
    """Cached tokens of the step's requests once it was done."""

    def check_current(self) -> None:
        """ValueError once a request of the step was closed or went on: its rows may be another's by now."""
        now = {request: self.cache.lengths.get(request) for request in self.lengths}
        if now != self.lengths:
            raise ValueError(f"the step left its requests at {dict(self.lengths)} tokens, they are now at {now}")


def check_tokens(config: GLM53Config, name: str, token_ids: Sequence[int] | Tensor) -> list[int]:
    """Token ids, or none, as Python ints; ValueError unless they are tokens."""
    ids: Sequence[int] = token_ids.tolist() if isinstance(token_ids, Tensor) else token_ids
    if not hasattr(ids, "__len__"):
        raise ValueError(f"{name}={ids!r} must be a sequence of token ids")
    if any(type(token) is not int for token in ids):
        ids = [require_int(f"{name}: token id", token) for token in ids]
    if len(ids) and (min(ids) < 0 or max(ids) >= config.vocab_size):
        raise ValueError(f"{name} has token ids in [{min(ids)}, {max(ids)}], the vocabulary has {config.vocab_size}")
    return list(ids)


def check_ids(config: GLM53Config, name: str, token_ids: Sequence[int] | Tensor, context: int) -> list[int]:
    """Token ids as Python ints; ValueError unless they are tokens that fit behind ``context`` positions."""
    ids = check_tokens(config, name, token_ids)
    if not ids:
        raise ValueError(f"{name} is empty")
    if context + len(ids) > config.max_position_embeddings:
        raise ValueError(
            f"{name} needs {context + len(ids)} positions, {len(ids)} for its ids and {context} for others; "
            f"max_position_embeddings={config.max_position_embeddings}"
        )
    return ids


def check_requests(
    model: GLM53, cache: EngineCache, new_ids: Mapping[int, Sequence[int] | Tensor]
) -> dict[int, list[int]]:
    """The ids of a step as Python ints; ValueError unless its requests are open and the ids fit behind them."""
    if (cache.kv.mla, cache.kv.index, cache.kv.kv, cache.kv.cp) != (model.mla, model.index, model.kv, model.cp):
        raise ValueError("the cache was made by another model: its row formats or its split differ")
    checked = {}
    for request, ids in new_ids.items():
        if request not in cache.lengths:
            raise ValueError(f"request {request} is not open; open: {sorted(cache.lengths)}")
        checked[request] = check_ids(model.config, f"request {request}", ids, cache.lengths[request])
    return checked


def plan_step(
    model: GLM53, cache: EngineCache, prompts: Mapping[int, list[int]], decodes: Mapping[int, list[int]]
) -> StepPlan:
    """Reserve the pages of a step and plan it. All or nothing: an error changes no state."""
    if both := prompts.keys() & decodes.keys():
        raise ValueError(f"requests {sorted(both)} are given as prompts and as decodes")
    lengths = cache.lengths
    cache.tables.reserve({request: lengths[request] + len(ids) for request, ids in {**prompts, **decodes}.items()})
    return make_step_plan(
        model.cp.plan([len(ids) for ids in prompts.values()], [lengths[request] for request in prompts]),
        cache.tables.table(list(prompts)),
        decode_context_lens=[lengths[request] for request in decodes],
        decode_query_lens=[len(ids) for ids in decodes.values()],
        decode_tables=cache.tables.table(list(decodes)),
    )


def local_ids(model: GLM53, plan: StepPlan, ids: Sequence[int]) -> Tensor:
    """int64 [local rows] out of a step's ids, prompts packed and then decode rows. Local, no sync."""
    return local_rows(model, plan, to_device(torch.tensor(ids, dtype=torch.int64), model.device))


def local_rows(model: GLM53, plan: StepPlan, packed: Tensor) -> Tensor:
    """This rank's rows of a tensor of a step's tokens, prompts packed and then decode rows. Local, no sync."""
    prompt, decode = packed.split([plan.prompt.num_tokens, plan.decode_rows])
    return torch.cat([model.cp.shard(prompt, plan.prompt), decode])
