"""The KV cache of one engine under PCP x DCP, and one layer's attention over it.

PCP splits the queries of prompts, DCP splits the cached rows. In prefill the rows go to the queries: new rows are
all-gathered over the PCP ranks and stored by their owner, and each layer gathers the shards of its context into a
temporary full copy. In decode the queries go to the rows: each rank scores and attends over its own shard, the
selection is made global by exchanging candidates, and the partial results merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .cp_shard import LoadBalancedCPShard
from .formats import IndexRows, MlaRows
from .integers import require_int
from .kernels.indexer_topk import indexer_topk
from .kernels.sparse_mla import sparse_mla
from .kernels.topk_select import INVALID, decode_order, encode_order, merge_orders
from .kv_shard import RoundRobinKVShard
from .lse_merge import LSEMerge
from .paged_rows import PagedRows
from .partial import Partial, merge_partials
from .step_plan import StepPlan

BLOCK_ROWS = 512
"""Query rows handled at once: bounds the memory of queries and outputs, changes no bit of a result."""


@dataclass
class TrafficCounters:
    """What this rank stored and received, in rows and bytes, since it was made."""

    rows_stored: int = 0
    """Tokens whose rows this rank keeps; one token counts once, whatever the number of layers."""
    bytes_stored: int = 0
    new_row_bytes: int = 0
    """Received with the new rows of prompts, in all layers."""
    context_bytes: int = 0
    """Received with gathered contexts, in all layers."""

    def since(self, before: TrafficCounters) -> TrafficCounters:
        """What came on top of an earlier state of these counters."""
        return TrafficCounters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class RowBlock:
    """Consecutive local rows that take one path through a layer."""

    rows: slice
    path: Literal["sparse", "dense", "decode"]
    request: int = -1
    """Of a dense block: its request in the step's prompt batch."""


def check_decode_parts(decode_parts: int, kv: RoundRobinKVShard) -> None:
    """ValueError unless decode attention can be summed in that many parts: any number on one rank, else one a rank."""
    require_int("decode_parts", decode_parts, minimum=1)
    if kv.world_size > 1 and decode_parts not in (1, kv.world_size):
        raise ValueError(f"decode_parts={decode_parts} does not fit {kv.world_size} DCP ranks")


class ContextParallelKV:
    """Paged MLA rows of all layers and index rows of the layers that have an indexer, this rank's shard.

    Args:
        cp: PCP split of prompt queries. kv: DCP split of rows; both bring their groups.
        merge: LSE merge over kv's group with scatter="none" (every rank of a block needs all heads of all rows);
            needed to decode over more than one rank.
        mla, index: row formats. num_layers: layers with MLA rows; index_layers: those that also have index rows.
        num_pages: pages of each layer on this rank.
        decode_parts: with one DCP rank, decode attention is summed in as many parts as this many ranks would.

    Raises:
        ValueError: decode_parts and DCP ranks that contradict each other.
    """

    def __init__(
        self,
        *,
        cp: LoadBalancedCPShard,
        kv: RoundRobinKVShard,
        merge: LSEMerge | None,
        mla: MlaRows,
        index: IndexRows,
        num_layers: int,
        index_layers: Sequence[int],
        num_pages: int,
        decode_parts: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        check_decode_parts(decode_parts, kv)
        self.cp, self.kv, self.merge = cp, kv, merge
        self.mla, self.index = mla, index
        self.device = torch.device(device)
        page_size = kv.layout.page_size
        self.mla_rows = PagedRows(mla, num_layers=num_layers, num_pages=num_pages, page_size=page_size, device=device)
        self._index_place = {layer: place for place, layer in enumerate(index_layers)}
        self.index_rows = PagedRows(
            index, num_layers=len(index_layers), num_pages=num_pages, page_size=page_size, device=device
        )
        self.traffic = TrafficCounters()
        if kv.world_size > 1:
            self.parts = [kv]
        else:
            layout = kv.layout
            self.parts = [
                RoundRobinKVShard(world_size=decode_parts, rank=part, interleave=layout.interleave, page_size=page_size)
                for part in range(decode_parts)
            ]

    def begin(self, plan: StepPlan, *, dense_up_to: int = 0) -> KVStep:
        """This rank's view of the cache for one step. Local.

        ``dense_up_to``: prompts whose whole length (context and new tokens, a global number) is at most this take the
        "dense" path; 0 keeps all on the sparse one.
        """
        return KVStep(self, plan, dense_up_to)

    def index_place(self, layer: int) -> int:
        """Where a layer's index rows are kept among ``index_rows``; ValueError if it has none."""
        if layer not in self._index_place:
            raise ValueError(f"layer {layer} has no index rows; layers with an indexer: {sorted(self._index_place)}")
        return self._index_place[layer]


class KVStep:
    """One step over a :class:`ContextParallelKV`: slots, lengths and row blocks, made once and used by every layer.

    Local rows are this rank's prompt rows, then all decode rows (see :class:`StepPlan`).
    """

    def __init__(self, cache: ContextParallelKV, plan: StepPlan, dense_up_to: int) -> None:
        self.cache, self.plan = cache, plan
        kv, prompt, device = cache.kv, plan.prompt, cache.device
        # By rank, so that a long step works on arrays that fit the cache; numpy, since torch's threads cost more than
        # they give on host integers.
        shares = [prompt.for_rank(rank) for rank in range(prompt.world_size)]
        slots = [kv.slot_mapping(share.positions, share.request_ids, plan.prompt_tables).numpy() for share in shares]
        prompt_slots = torch.from_numpy(np.concatenate(slots))
        decode_slots = kv.slot_mapping(plan.decode_positions, plan.decode_request_ids, plan.decode_tables)
        self._stored = int(np.count_nonzero(prompt_slots.numpy() >= 0) + np.count_nonzero(decode_slots.numpy() >= 0))
        # Rows of prompts arrive rank-major, which is the order of these slots.
        self.prompt_slots, self.decode_slots = prompt_slots.to(device), decode_slots.to(device)

        self.prompt_lens = torch.tensor(prompt.query_lens, dtype=torch.int64) + torch.tensor(
            prompt.context_lens, dtype=torch.int64
        )
        self.prompt_tables = plan.prompt_tables.to(device)
        self.prompt_local_lens = kv.local_lens(self.prompt_lens).tolist()
        starts = torch.cumsum(self.prompt_lens, 0) - self.prompt_lens
        self.key_starts = starts[prompt.request_ids].to(device)
        self.kv_lens = prompt.kv_lens.to(device)

        self.decode_kv_lens = (plan.decode_positions + 1).to(device)
        self.decode_request_ids = plan.decode_request_ids.to(device)
        self.decode_tables = plan.decode_tables.to(device)
        decode_lens = torch.tensor(plan.decode_context_lens, dtype=torch.int64) + torch.tensor(
            plan.decode_query_lens, dtype=torch.int64
        )
        self.decode_local_lens = kv.local_lens(decode_lens).tolist()
        # Lengths are made local per row, after the rows of a verification step are laid out: each sees one token more.
        self.part_lens = [part.local_lens(plan.decode_positions + 1).to(device) for part in cache.parts]
        self.part_starts = [
            (lens.cumsum(0) - lens)[plan.decode_request_ids].to(device)
            for lens in (part.local_lens(decode_lens) for part in cache.parts)
        ]
        self.part_rows = [None] if len(cache.parts) == 1 else [self._rows_of(p, decode_lens) for p in cache.parts]
        self.dense_up_to = dense_up_to
        self.blocks = tuple(self._blocks())

    def _rows_of(self, part: RoundRobinKVShard, lens: Tensor) -> Tensor:
        """Where a part's rows lie among whole sequences packed one after another, in its local index order."""
        local = part.local_lens(lens)
        request_ids = torch.repeat_interleave(torch.arange(len(local)), local)
        local_index = torch.arange(len(request_ids)) - (local.cumsum(0) - local)[request_ids]
        starts = (lens.cumsum(0) - lens)[request_ids]
        return (starts + part.layout.position(part.rank, local_index)).to(self.cache.device)

    def _blocks(self) -> Iterator[RowBlock]:
        plan = self.plan
        counts = np.bincount(plan.prompt.request_ids.numpy(), minlength=len(plan.prompt.query_lens)).tolist()
        begin = row = 0
        for request, (count, length) in enumerate(zip(counts, self.prompt_lens.tolist(), strict=True)):
            if length <= self.dense_up_to:
                yield from _cut(begin, row, "sparse")
                yield RowBlock(slice(row, row + count), "dense", request)
                begin = row + count
            row += count
        yield from _cut(begin, row, "sparse")
        yield from _cut(row, row + plan.decode_rows, "decode")

    def append(self, layer: int, mla_rows: Tensor, index_rows: Tensor | None) -> None:
        """Store this step's new rows of one layer. Collective over PCP: one all-gather for both kinds of rows.

        mla_rows uint8 [local rows, mla.row_bytes]; index_rows uint8 [local rows, index.row_bytes] on layers with an
        indexer, else None. Every rank receives the prompt rows of all ranks and keeps those it owns; decode rows are
        computed alike everywhere and need no transfer.
        """
        cache = self.cache
        counts = self.plan.prompt.counts
        own = counts[self.plan.prompt.rank]
        rows = mla_rows if index_rows is None else torch.cat([mla_rows, index_rows], dim=1)
        prompt_rows = cache.cp.gather_rank_major(rows[:own], self.plan.prompt)
        cache.traffic.new_row_bytes += (sum(counts) - own) * rows.shape[1]
        width = mla_rows.shape[1]
        for slots, new in ((self.prompt_slots, prompt_rows), (self.decode_slots, rows[own:])):
            cache.mla_rows.store(layer, slots, new[:, :width])
            if index_rows is not None:
                cache.index_rows.store(cache.index_place(layer), slots, new[:, width:])
        cache.traffic.bytes_stored += self._stored * rows.shape[1]
        if layer == 0:
            cache.traffic.rows_stored += self._stored

    def context(self, layer: int, *, with_index: bool) -> LayerContext:
        """The temporary full-context copy of one layer. Collective over DCP if the step has prompts.

        Leave it (``with``) to free the copy before the next layer's is made.
        """
        return LayerContext(self, layer, with_index)


def _cut(start: int, stop: int, path: Literal["sparse", "decode"]) -> Iterator[RowBlock]:
    edges = [*range(start, stop, BLOCK_ROWS), stop]
    for first, end in pairwise(edges):
        yield RowBlock(slice(first, end), path)


class LayerContext:
    """What the rows of a step attend to in one layer: gathered prompt contexts, and own shards for decode rows."""

    def __init__(self, step: KVStep, layer: int, with_index: bool) -> None:
        self.step, self.layer = step, layer
        self.cache = cache = step.cache
        self.prompt_rows = cache.mla.unpack_joint(self._gather(cache.mla_rows, layer))
        self.prompt_keys: Tensor | None = None
        self._part_keys: list[Tensor] = []
        if with_index:
            place = cache.index_place(layer)
            self.prompt_keys = cache.index.unpack(self._gather(cache.index_rows, place))
            keys = cache.index.unpack(
                cache.index_rows.gather_sequences(place, step.decode_tables, step.decode_local_lens)
            )
            self._part_keys = [keys if rows is None else keys[rows] for rows in step.part_rows]

    def __enter__(self) -> LayerContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.prompt_rows = self.prompt_rows.new_empty(0, self.prompt_rows.shape[1])
        self.prompt_keys, self._part_keys = None, []

    def _gather(self, pages: PagedRows, place: int) -> Tensor:
        """Position-ordered packed rows of the prompts' contexts, new tokens included."""
        local = pages.gather_sequences(place, self.step.prompt_tables, self.step.prompt_local_lens)
        kv = self.cache.kv
        if kv.world_size == 1:
            return local
        full = kv.gather_context(local, self.step.prompt_lens)
        self.cache.traffic.context_bytes += (full.shape[0] - local.shape[0]) * full.shape[1]
        return full

    def select(self, block: RowBlock, query: Tensor, weights: Tensor, k: int) -> Tensor:
        """The k best keys of each row of a sparse or decode block, as positions in the row's sequence.

        query float32 [rows, H, D] and weights float32 [rows, H], scales applied. Returns int64 [rows, k], positions
        ascending, then -1. A decode block is collective over DCP: candidates (score, position) are exchanged, and
        every rank takes the same ones.
        """
        query = self.cache.index.round_query(query)
        if block.path == "sparse":
            if self.prompt_keys is None:
                raise ValueError(f"layer {self.layer}: the context was made without index rows")
            starts, lens = self.step.key_starts[block.rows], self.step.kv_lens[block.rows]
            positions, _ = indexer_topk(query, weights, self.prompt_keys, key_starts=starts, kv_lens=lens, k=k)
            return _ascending(positions)
        rows = self._decode_rows(block)
        orders = []
        for number, part in enumerate(self.cache.parts):
            local, scores = indexer_topk(
                query,
                weights,
                self._part_keys[number],
                key_starts=self.step.part_starts[number][rows],
                kv_lens=self.step.part_lens[number][rows],
                k=k,
            )
            order = encode_order(scores, part.layout.position(part.rank, local.clamp(min=0)))
            orders.append(order.masked_fill_(local < 0, INVALID))
        candidates = self.cache.kv.gather_candidates(torch.cat(orders, dim=1))
        _, positions = decode_order(merge_orders(candidates, k))
        return _ascending(positions)

    def attend(self, block: RowBlock, query: Tensor, selected: Tensor, *, scale: float) -> Tensor:
        """Absorbed attention of a sparse or decode block over its selected positions -> float32 [rows, H, latent].

        query [rows, H, latent + rope]; selected as `select` returns it (of this layer or of the layer it shares).
        A decode block is collective over DCP (LSE merge).
        """
        latent = self.cache.mla.latent
        if block.path == "sparse":
            starts = self.step.key_starts[block.rows].unsqueeze(1)
            ids = torch.where(selected < 0, -1, selected + starts)
            return sparse_mla(query, self.prompt_rows, ids, scale=scale, v_dim=latent)[0]
        rows = self._decode_rows(block)
        partials = [self._attend_part(part, query, selected, rows, scale) for part in self.cache.parts]
        if self.cache.kv.world_size == 1:
            return merge_partials(partials).out
        if self.cache.merge is None:
            raise ValueError(f"decode over {self.cache.kv.world_size} DCP ranks needs merge=")
        return self.cache.merge(partials[0]).out

    def _attend_part(
        self, part: RoundRobinKVShard, query: Tensor, selected: Tensor, rows: slice, scale: float
    ) -> Partial:
        """A decode block over one shard: selected rows of other shards are holes, in the columns they have."""
        cache, step = self.cache, self.step
        mine = part.localize(selected, step.decode_kv_lens[rows]) >= 0
        count, k = selected.shape
        slots = cache.kv.slot_mapping(
            torch.where(mine, selected, -1).flatten(),
            step.decode_request_ids[rows].repeat_interleave(k),
            step.decode_tables,
        )
        keys = cache.mla.unpack_joint(cache.mla_rows.gather(self.layer, slots))
        ids = torch.where(mine, torch.arange(count * k, device=mine.device).view(count, k), -1)
        return Partial(*sparse_mla(query, keys, ids, scale=scale, v_dim=cache.mla.latent))

    def _decode_rows(self, block: RowBlock) -> slice:
        """A decode block's rows counted from the first decode row."""
        first = self.step.plan.prompt_rows
        return slice(block.rows.start - first, block.rows.stop - first)

    def prompt_sequence(self, request: int) -> Tensor:
        """All rows of one prompt, float32 [context + new, latent + rope], for the dense path. Local."""
        lens = self.step.prompt_lens
        start = int(lens[:request].sum())
        return self.prompt_rows[start : start + int(lens[request])]


def _ascending(positions: Tensor) -> Tensor:
    """Positions [T, k] with -1 for none -> ascending, then -1: one order of summation for one set."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.sort(torch.where(positions < 0, last, positions), dim=1).values
    return torch.where(ordered == last, -1, ordered)
