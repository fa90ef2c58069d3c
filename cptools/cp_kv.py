"""The KV cache of one engine under PCP x DCP, and one layer's attention over it.

PCP splits the queries of prompts, DCP splits the cached rows. In prefill the rows go to the queries: new rows are
all-gathered over the PCP ranks and stored by their owner, and each layer gathers the shards of its context into a
temporary full copy. In decode the queries go to the rows: each rank scores and attends over its own shard, the
selection is made global by exchanging candidates, and the partial results merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from .cp_shard import LoadBalancedCPShard
from .formats import IndexRows, MlaRows
from .integers import require_int
from .kernels.norm_rope_store import IndexInput, MlaInput, norm_rope_store
from .kernels.rowwise import RopeAngles
from .kv_shard import RoundRobinKVShard
from .layer_context import LayerContext
from .lse_merge import LSEMerge
from .paged_rows import PagedRows
from .step_plan import StepPlan
from .step_rows import CPU_BLOCK_ROWS, GPU_BLOCK_ROWS, DecodeRows, PromptRows, row_blocks


@dataclass
class TrafficCounters:
    """What this rank stored and received, in rows and bytes, since it was made."""

    rows_stored: int = 0
    """Tokens whose rows this rank keeps; one token counts once, whatever the number of layers."""
    rows_dropped: int = 0
    """Of these tokens, those given up again, such as rejected drafts."""
    bytes_stored: int = 0
    new_row_bytes: int = 0
    """Received with the new rows of prompts, in all layers."""
    context_bytes: int = 0
    """Received with gathered contexts, in all layers."""

    def since(self, before: TrafficCounters) -> TrafficCounters:
        """What came on top of an earlier state of these counters."""
        return TrafficCounters(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, eq=False)
class NewLatents:
    """What one layer keeps of a step's new tokens for attention, before norm and rotation: c_kv [rows, latent], k_pe
    [rows, rope], and the RMS norm of the latents."""

    c_kv: Tensor
    k_pe: Tensor
    norm_weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class NewKeys:
    """The same for its indexer: keys [rows, dim] before their layer norm and rotation."""

    key: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    eps: float


def check_decode_parts(decode_parts: int, kv: RoundRobinKVShard) -> None:
    """ValueError unless decode attention can be summed in that many parts: any number on one rank, else one a rank."""
    require_int("decode_parts", decode_parts, minimum=1)
    if kv.world_size > 1 and decode_parts not in (1, kv.world_size):
        raise ValueError(f"decode_parts={decode_parts} does not fit {kv.world_size} DCP ranks")


class ContextParallelKV:
    """Paged MLA rows of all layers and index rows of the layers that have an indexer, this rank's shard.

    Args:
        cp: PCP split of prompt queries. kv: DCP split of rows; both bring their groups.
        merge: LSE merge over kv's group with scatter="none" (every rank of a block needs all heads of all rows), or
            "heads" where each has heads of its own; needed to decode over more than one rank.
        mla, index: row formats. num_layers: layers with MLA rows; index_layers: those that also have index rows.
        num_pages: pages of each layer on this rank.
        decode_parts: with one DCP rank, decode attention is summed in as many parts as this many ranks would.

    Raises:
        ValueError: decode_parts and DCP ranks that contradict each other, or 2^31 rows a layer or more.
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
        if num_pages * page_size >= 2**31:
            raise ValueError(f"{num_pages} pages of {page_size} rows: slots are kept in 32 bits, so below 2^31 rows")
        self.mla_rows = PagedRows(mla, num_layers=num_layers, num_pages=num_pages, page_size=page_size, device=device)
        self._index_place = {layer: place for place, layer in enumerate(index_layers)}
        self.index_rows = PagedRows(
            index, num_layers=len(index_layers), num_pages=num_pages, page_size=page_size, device=device
        )
        self.traffic = TrafficCounters()
        self.block_rows = CPU_BLOCK_ROWS if self.device.type == "cpu" else GPU_BLOCK_ROWS
        layout = kv.layout
        self.parts = [
            RoundRobinKVShard(world_size=decode_parts, rank=part, interleave=layout.interleave, page_size=page_size)
            for part in range(decode_parts if kv.world_size == 1 < decode_parts else 0)
        ]
        """On one rank, the shards that it sums its decode attention in; empty for one sum."""
        no_tables = torch.empty(0, 0, dtype=torch.int64)
        self._no_prompts = PromptRows(kv, cp.plan([]), no_tables, self.device)

    def begin(self, plan: StepPlan, *, dense_up_to: int = 0) -> KVStep:
        """This rank's view of the cache for one step. Local.

        ``dense_up_to``: prompts whose whole length (context and new tokens, a global number) is at most this take the
        "dense" path; 0 keeps all on the sparse one.
        """
        prompt = PromptRows(self.kv, plan.prompt, plan.prompt_tables, self.device)
        return KVStep(self, prompt, DecodeRows.of_plan(self.kv, plan, self.device), dense_up_to)

    def begin_decode(self, rows: DecodeRows) -> KVStep:
        """A step of decode rows alone, whose data may be persistent buffers on the device. Local, no sync, capturable.

        Without ``rows.stored`` the counters of traffic do not see it.
        """
        return KVStep(self, self._no_prompts, rows, 0)

    def index_place(self, layer: int) -> int:
        """Where a layer's index rows are kept among ``index_rows``; ValueError if it has none."""
        if layer not in self._index_place:
            raise ValueError(f"layer {layer} has no index rows; layers with an indexer: {sorted(self._index_place)}")
        return self._index_place[layer]


class KVStep:
    """One step over a :class:`ContextParallelKV`: its rows and row blocks, made once and used by every layer.

    Local rows are this rank's prompt rows, then all decode rows (see :class:`StepPlan`).
    """

    def __init__(self, cache: ContextParallelKV, prompt: PromptRows, decode: DecodeRows, dense_up_to: int) -> None:
        self.cache, self.prompt, self.decode = cache, prompt, decode
        self.positions = torch.cat([prompt.positions, decode.positions])
        """int64 [local rows] on the device; -1 for padding."""
        self.blocks = tuple(row_blocks(prompt, len(decode), dense_up_to=dense_up_to, block_rows=cache.block_rows))
        # Rows of prompts travel where other ranks compute some; rows of decode steps never do.
        self._travel = cache.cp.world_size > 1 and prompt.plan.num_tokens > 0
        self._slots = torch.cat([prompt.slots, decode.slots])

    def append(self, layer: int, angles: RopeAngles, latents: NewLatents, keys: NewKeys | None) -> None:
        """Norm, rotate, pack and store this step's new rows of one layer; ``keys`` on layers with an indexer.

        Collective over PCP if the step has prompts: one all-gather for both kinds of rows, packed. Every rank receives
        the prompt rows of all ranks and keeps those it owns; decode rows are computed alike everywhere and need no
        transfer.
        """
        cache = self.cache
        pages = cache.mla_rows.pages[layer]
        index_pages = None if keys is None else cache.index_rows.pages[cache.index_place(layer)]
        stored = self.prompt.stored + self.decode.stored
        width, index_width = cache.mla.row_bytes, 0 if keys is None else cache.index.row_bytes
        cache.traffic.bytes_stored += stored * (width + index_width)
        if layer == 0:
            cache.traffic.rows_stored += stored
        if not self._travel:
            self._store(self._slots, angles, latents, keys, pages, index_pages, cache.mla_rows.page_size)
            return
        # Pages of one row each are packed rows.
        rows = torch.empty(latents.c_kv.shape[0], width + index_width, dtype=torch.uint8, device=cache.device)
        in_order = torch.arange(rows.shape[0], device=cache.device)
        self._store(in_order, angles, latents, keys, rows[:, :width], rows[:, width:], 1)
        own = self.prompt.rows
        every = cache.cp.gather_rank_major(rows[:own], self.prompt.plan)
        cache.traffic.new_row_bytes += (every.shape[0] - own) * rows.shape[1]
        for slots, new in ((self.prompt.slots, every), (self.decode.slots, rows[own:])):
            cache.mla_rows.store(layer, slots, new[:, :width])
            if keys is not None:
                cache.index_rows.store(cache.index_place(layer), slots, new[:, width:])

    def _store(
        self,
        slots: Tensor,
        angles: RopeAngles,
        latents: NewLatents,
        keys: NewKeys | None,
        pages: Tensor,
        index_pages: Tensor | None,
        page_size: int,
    ) -> None:
        cache = self.cache
        index = None
        if keys is not None and index_pages is not None:
            index = IndexInput(keys.key, keys.norm_weight, keys.norm_bias, keys.eps, index_pages, cache.index)
        mla = MlaInput(latents.c_kv, latents.k_pe, latents.norm_weight, latents.eps, pages, cache.mla)
        norm_rope_store(slots, angles, mla=mla, index=index, page_size=page_size)

    def context(self, layer: int, *, with_index: bool) -> LayerContext:
        """The temporary full-context copy of one layer. Collective over DCP if the step has prompts.

        Leave it (``with``) to free the copy before the next layer's is made.
        """
        return LayerContext(self, layer, with_index)
