"""What one step of an engine computes: prompt rows, split by PCP, and decode rows, computed by every PCP rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cp_plan import CPPlan
from .integers import require_int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step. A rank's rows are its prompt rows (``prompt``), then all decode rows, request after request.

    A request is in its prompt phase or in its decode phase, whatever the number of its rows: prompt rows gather their
    context, decode rows (sampled and verification rows) send their queries. So every rank takes the same path.
    Tables are int64 [requests, blocks] page ids.
    """

    prompt: CPPlan
    prompt_tables: Tensor
    decode_query_lens: tuple[int, ...]
    decode_context_lens: tuple[int, ...]
    decode_tables: Tensor
    decode_positions: Tensor
    decode_request_ids: Tensor

    @property
    def prompt_rows(self) -> int:
        """Prompt rows of this rank."""
        return self.prompt.counts[self.prompt.rank]

    @property
    def decode_rows(self) -> int:
        return sum(self.decode_query_lens)

    @property
    def positions(self) -> Tensor:
        """Absolute positions of this rank's rows, int64."""
        return torch.cat([self.prompt.positions, self.decode_positions])


def make_step_plan(
    prompt: CPPlan,
    prompt_tables: Tensor,
    *,
    decode_context_lens: Sequence[int] = (),
    decode_query_lens: Sequence[int] | None = None,
    decode_tables: Tensor | None = None,
) -> StepPlan:
    """Complete a step from its CP plan and its decoding requests (one query row each unless said). Local."""
    contexts = tuple(require_int("decode_context_lens", n, minimum=0) for n in decode_context_lens)
    queries = (1,) * len(contexts)
    if decode_query_lens is not None:
        queries = tuple(require_int("decode_query_lens", n, minimum=0) for n in decode_query_lens)
    if decode_tables is None:
        decode_tables = torch.empty(0, 0, dtype=torch.int64)
    if not len(contexts) == len(queries) == decode_tables.shape[0]:
        raise ValueError(
            f"decode requests: {len(contexts)} context lengths, {len(queries)} query lengths, "
            f"{decode_tables.shape[0]} tables"
        )
    if prompt_tables.shape[0] != len(prompt.query_lens):
        raise ValueError(f"prompt requests: {len(prompt.query_lens)} lengths, {prompt_tables.shape[0]} tables")
    counts = np.asarray(queries, dtype=np.int64)
    request_ids = np.repeat(np.arange(len(counts)), counts)
    first_rows = np.cumsum(counts) - counts
    offsets = np.arange(len(request_ids)) - first_rows[request_ids]
    positions = np.asarray(contexts, dtype=np.int64)[request_ids] + offsets
    return StepPlan(
        prompt=prompt,
        prompt_tables=prompt_tables,
        decode_query_lens=queries,
        decode_context_lens=contexts,
        decode_tables=decode_tables,
        decode_positions=torch.from_numpy(positions),
        decode_request_ids=torch.from_numpy(request_ids.astype(np.int64)),
    )
