"""The rows of one step as the cache sees them, made once and used by every layer: prompt rows and decode rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .cp_plan import CPPlan
from .host_copy import to_device
from .kv_shard import RoundRobinKVShard
from .step_plan import StepPlan

CPU_BLOCK_ROWS = 512
GPU_BLOCK_ROWS = 4096
"""Query rows handled at once: bounds the memory of queries and outputs, changes no bit of a result. The kernels of
prompts want 2048 queries or more."""


@dataclass(frozen=True)
class RowBlock:
    """Consecutive local rows that take one path through a layer."""

    rows: slice
    path: Literal["sparse", "dense", "decode"]
    request: int = -1
    """Of a dense block: its request in the step's prompt batch."""


class PromptRows:
    """The prompts of a step: slots of all their new rows, and lengths and limits of this rank's queries.

    Lengths are on the host, for collectives; what kernels read is on the device, copied there without a sync.
    """

    def __init__(self, kv: RoundRobinKVShard, prompt: CPPlan, tables: Tensor, device: torch.device) -> None:
        self.plan, self._kv = prompt, kv
        # By rank, so that a long step works on arrays that fit the cache; numpy, since torch's threads cost more than
        # they give on host integers.
        shares = [prompt.for_rank(rank) for rank in range(prompt.world_size)]
        slots = [kv.slot_mapping(share.positions, share.request_ids, tables).numpy() for share in shares]
        all_slots = np.concatenate(slots)
        self.stored = int(np.count_nonzero(all_slots >= 0))
        self.slots = to_device(torch.from_numpy(all_slots), device)
        """int64 [tokens]: where this rank stores the new rows, rank-major as they arrive; -1 where another does."""
        self.lens = torch.tensor(prompt.query_lens, dtype=torch.int64) + torch.tensor(
            prompt.context_lens, dtype=torch.int64
        )
        self.longest = int(self.lens.max()) if len(self.lens) else 0
        self.local_lens = kv.local_lens(self.lens).tolist()
        self.tables = to_device(tables, device)
        starts = torch.cumsum(self.lens, 0) - self.lens
        self.key_starts = to_device(starts[prompt.request_ids], device)
        self.kv_lens = to_device(prompt.kv_lens, device)
        self.positions = to_device(prompt.positions, device)
        self.counts = np.bincount(prompt.request_ids.numpy(), minlength=len(prompt.query_lens)).tolist()
        """This rank's rows of each request."""

    @property
    def rows(self) -> int:
        """Prompt rows of this rank."""
        return self.plan.counts[self.plan.rank]

    @cached_property
    def context_slots(self) -> Tensor:
        """int64 [sum of lens]: where this rank keeps the prompts' contexts, new tokens included, request after request
        in order of position; -1 where another rank does. Made on the device when first asked for."""
        device = self.tables.device
        lens, total = to_device(self.lens, device), int(self.lens.sum())
        requests = torch.repeat_interleave(torch.arange(len(lens), device=device), lens, output_size=total)
        positions = torch.arange(total, device=device) - (lens.cumsum(0) - lens)[requests]
        return self._kv.slot_mapping(positions, requests, self.tables)


class DecodeRows:
    """The decode rows of a step on the device, the same on all ranks: T rows of R requests, request after request.

    Everything here is a tensor of a shape that the number of rows alone decides, so a CUDA graph may be captured over
    it: a *padding* row has position -1, sees no key, is stored nowhere and selects nothing.

    Args:
        positions: int64 [T], absolute; -1 for padding. request_ids: int64 [T], rows of ``tables``.
        tables: int64 [R, blocks] page ids.
        slots: int64 [T], where this rank stores the new rows; -1 where another does, and for padding.
        per_request: rows of each request, if all have as many; else 0.
        stored: rows with a slot, where the host knows it.
    """

    def __init__(
        self,
        kv: RoundRobinKVShard,
        positions: Tensor,
        request_ids: Tensor,
        tables: Tensor,
        slots: Tensor,
        *,
        per_request: int,
        stored: int = 0,
    ) -> None:
        if per_request and positions.shape[0] != per_request * tables.shape[0]:
            raise ValueError(f"{positions.shape[0]} rows are not {per_request} for each of {tables.shape[0]} requests")
        self.positions, self.request_ids, self.tables, self.slots = positions, request_ids, tables, slots
        self.per_request, self.stored = per_request, stored
        self.kv_lens = positions + 1
        """int64 [T]: keys that a row sees, itself included. A verification row sees one more than the row before it."""
        self.local_lens = kv.local_lens(self.kv_lens)
        """int64 [T]: those of them that this rank holds."""

    @classmethod
    def of_plan(cls, kv: RoundRobinKVShard, plan: StepPlan, device: torch.device) -> DecodeRows:
        """From a step planned on the host, no sync. Raises ValueError for a row whose table has no page for it."""
        slots = kv.slot_mapping(plan.decode_positions, plan.decode_request_ids, plan.decode_tables)
        lens = set(plan.decode_query_lens)
        return cls(
            kv,
            to_device(plan.decode_positions, device),
            to_device(plan.decode_request_ids, device),
            to_device(plan.decode_tables, device),
            to_device(slots, device),
            per_request=lens.pop() if len(lens) == 1 else 0,
            stored=int(np.count_nonzero(slots.numpy() >= 0)),
        )

    @classmethod
    def of_buffers(cls, kv: RoundRobinKVShard, context_lens: Tensor, tables: Tensor, *, per_request: int) -> DecodeRows:
        """From buffers on the device: ``per_request`` new rows of each request behind its context. No sync, capturable.

        context_lens: int64 [R], cached tokens of each request; -1 for a request of padding. tables: int64 [R, blocks].
        """
        offsets = torch.arange(per_request, device=context_lens.device)
        idle = (context_lens < 0).unsqueeze(1)
        positions = (context_lens.unsqueeze(1) + offsets).masked_fill(idle, -1).flatten()
        requests = torch.arange(tables.shape[0], device=tables.device).repeat_interleave(
            per_request, output_size=tables.shape[0] * per_request
        )
        slots = kv.slot_mapping(positions, requests, tables)
        return cls(kv, positions, requests, tables, slots, per_request=per_request)

    def __len__(self) -> int:
        return self.positions.shape[0]

    def tables_of(self, rows: slice) -> Tensor:
        """Block tables of some of the rows, of which each serves as many neighbours: [R', blocks], R' divides them."""
        each = self.per_request
        if each and rows.start % each == 0 and rows.stop % each == 0:
            return self.tables[rows.start // each : rows.stop // each]
        return self.tables[self.request_ids[rows]]


def row_blocks(prompt: PromptRows, decode_rows: int, *, dense_up_to: int, block_rows: int) -> Iterator[RowBlock]:
    """Local rows, prompts and then decode rows, cut where the path changes and after ``block_rows`` rows.

    Prompts whose whole length (context and new tokens, a global number) is at most ``dense_up_to`` are dense.
    """
    begin = row = 0
    for request, (count, length) in enumerate(zip(prompt.counts, prompt.lens.tolist(), strict=True)):
        if length <= dense_up_to:
            yield from _cut(begin, row, "sparse", block_rows)
            yield RowBlock(slice(row, row + count), "dense", request)
            begin = row + count
        row += count
    yield from _cut(begin, row, "sparse", block_rows)
    yield from _cut(row, row + decode_rows, "decode", block_rows)


def _cut(start: int, stop: int, path: Literal["sparse", "decode"], block_rows: int) -> Iterator[RowBlock]:
    edges = [*range(start, stop, block_rows), stop]
    for first, end in pairwise(edges):
        yield RowBlock(slice(first, end), path)
