"""One layer's attention over the cache: which rows each query selects, and attention over them.

Prompt rows read a temporary copy of their whole context, gathered over the DCP ranks; decode rows read this rank's
pages, exchange candidates and merge partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .formats import FP8, SCALE_BLOCK
from .kernels.impl import triton_obstacle
from .kernels.index_query import fp8_query, rotated_query
from .kernels.indexer_topk import IndexKeys, indexer_topk, indexer_topk_fp8
from .kernels.indexer_topk.chunks import by_position
from .kernels.kv_gather import unpack_rows
from .kernels.paged_topk import paged_topk
from .kernels.rowwise import RopeAngles
from .kernels.selected_slots import selected_slots
from .kernels.shard_candidates import chosen_positions, encode_candidates
from .kernels.sparse_mla import sparse_mla, sparse_mla_decode, unpacked_rows
from .kernels.topk_select import merge_orders
from .paged_rows import PagedRows
from .partial import Partial, merge_partials
from .step_rows import RowBlock

if TYPE_CHECKING:
    from .cp_kv import KVStep


@dataclass(frozen=True, eq=False)
class Selection:
    """What rows attend to. Made by layers with an indexer, read by the layers that share it: the same memory."""

    positions: Tensor
    """int64 [rows, k]: positions in the row's sequence, ascending, then -1."""
    ids: Tensor
    """int32 [rows, k]: where these stand for `LayerContext.attend`, in the gathered contexts of the step's prompts or,
    for decode rows, in this rank's pages; -1 where there is none or another rank holds it."""

    @classmethod
    def empty(cls, rows: int, k: int, device: torch.device) -> Selection:
        """Nothing selected."""
        positions = torch.full((rows, k), -1, dtype=torch.int64, device=device)
        return cls(positions, torch.full((rows, k), -1, dtype=torch.int32, device=device))

    def __getitem__(self, rows: slice) -> Selection:
        return Selection(self.positions[rows], self.ids[rows])


class LayerContext:
    """What the rows of a step attend to in one layer: gathered prompt contexts, and own pages for decode rows."""

    def __init__(self, step: KVStep, layer: int, with_index: bool) -> None:
        self.step, self.layer, self.with_index = step, layer, with_index
        self.cache = cache = step.cache
        # The reference scores float32, which it would make of FP8 for every block of queries.
        self._scores_fp8 = (
            cache.index.dtype == FP8 and cache.index.dim <= SCALE_BLOCK and triton_obstacle(cache.device) is None
        )
        self._context: Tensor | None = None
        self._keys: Tensor | IndexKeys | None = None
        if not step.prompt.plan.num_tokens:
            return
        # Once a layer, since it would be done again for every block of queries: the reference reads float32.
        if not _on_gpu(cache.mla_rows.pages):
            self._context = cache.mla.unpack_joint(self._gather(cache.mla_rows, layer))
        elif cache.kv.world_size == 1 and cache.mla.dtype == FP8:
            # One pass from pages to BF16 rows where nothing is gathered from other ranks.
            pages, page_size = cache.mla_rows.pages[layer], cache.mla_rows.page_size
            slots = step.prompt.context_slots
            self._context = unpack_rows(pages, slots, row_format=cache.mla, page_size=page_size)
        else:
            self._context = unpacked_rows(self._gather(cache.mla_rows, layer), cache.mla)
        if with_index:
            keys = self._gather(cache.index_rows, cache.index_place(layer))
            self._keys = IndexKeys.from_rows(keys) if self._scores_fp8 else cache.index.unpack(keys)

    def __enter__(self) -> LayerContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context = self._keys = None

    def _gather(self, pages: PagedRows, place: int) -> Tensor:
        """Position-ordered packed rows of the prompts' contexts, new tokens included."""
        prompt, kv = self.step.prompt, self.cache.kv
        local = pages.gather_sequences(place, prompt.tables, prompt.local_lens)
        if kv.world_size == 1:
            return local
        full = kv.gather_context(local, prompt.lens)
        self.cache.traffic.context_bytes += (full.shape[0] - local.shape[0]) * full.shape[1]
        return full

    def select(self, block: RowBlock, query: Tensor, weights: Tensor, angles: RopeAngles, out: Selection) -> None:
        """The k best keys of each row of a sparse or decode block, written into out [rows, k]: positions and ids.

        query [rows, H, D], whose first pairs are still to be rotated by angles, and weights float32 [rows, H], any
        scales applied. A decode block is collective over DCP: candidates (score, position) are exchanged, and every
        rank takes the same ones; no sync, capturable.
        """
        if not self.with_index:
            raise ValueError(f"layer {self.layer}: the context was made without index rows")
        k = out.positions.shape[1]
        if self._scores_fp8:
            query, weights = fp8_query(query, weights, angles)
        else:
            query = rotated_query(query, angles)
        if block.path == "sparse":
            starts = self.step.prompt.key_starts[block.rows]
            positions = self._select_prompt(block, query, weights, starts, k)
            out.positions.copy_(positions)
            out.ids.copy_(torch.where(positions < 0, -1, positions + starts.unsqueeze(1)))
            return
        decode, kv = self.step.decode, self.cache.kv
        rows = self._decode_rows(block)
        pages = self.cache.index_rows
        positions, scores = paged_topk(
            query,
            weights,
            pages.pages[self.cache.index_place(self.layer)],
            decode.tables_of(rows),
            kv_lens=decode.local_lens[rows],
            k=k,
            row_format=self.cache.index,
            page_size=pages.page_size,
        )
        if kv.world_size > 1:
            nominated = encode_candidates(positions, scores, layout=kv.layout, rank=kv.rank)
            positions = chosen_positions(merge_orders(kv.gather_candidates(nominated), k))
        out.positions.copy_(positions)
        self._locate(decode.request_ids[rows], out)

    def _select_prompt(self, block: RowBlock, query: Tensor, weights: Tensor, starts: Tensor, k: int) -> Tensor:
        prompt = self.step.prompt
        lens = prompt.kv_lens[block.rows]
        if isinstance(self._keys, IndexKeys):
            return indexer_topk_fp8(
                query,
                weights,
                self._keys,
                key_starts=starts,
                kv_lens=lens,
                k=k,
                columns=prompt.longest,
                sorted_by="position",
            )[0]
        if self._keys is None:
            raise ValueError(f"layer {self.layer}: the context was left")
        query = self.cache.index.round_query(query)
        return by_position(*indexer_topk(query, weights, self._keys, key_starts=starts, kv_lens=lens, k=k))[0]

    def _locate(self, request_ids: Tensor, selection: Selection) -> None:
        """From positions of decode rows to slots of this rank's pages, in place."""
        kv, tables = self.cache.kv, self.step.decode.tables
        selected_slots(selection.ids, selection.positions, request_ids, tables, layout=kv.layout, rank=kv.rank)

    def attend(self, block: RowBlock, query: Tensor, selected: Selection, *, scale: float) -> Tensor:
        """Absorbed attention of a sparse or decode block over its selected rows -> float [rows, H, latent].

        query [rows, H, latent + rope]; selected as `select` wrote it, in this layer or in the layer it shares. A decode
        block is collective over DCP (LSE merge); no sync, and capturable where the kernels serve the rows.
        """
        latent = self.cache.mla.latent
        if block.path == "sparse":
            if self._context is None:
                raise ValueError(f"layer {self.layer}: the context was left")
            dtype = query.dtype if query.dtype == torch.bfloat16 else torch.float32
            return sparse_mla(query, self._context, selected.ids, scale=scale, v_dim=latent, out_dtype=dtype)[0]
        kv = self.cache.kv
        if kv.world_size > 1:
            if self.cache.merge is None:
                raise ValueError(f"decode over {kv.world_size} DCP ranks needs merge=")
            return self.cache.merge(self._attend_pages(query, selected.ids, scale)).out
        if not self.cache.parts:
            return self._attend_pages(query, selected.ids, scale).out
        mine = [part.localize(selected.positions) >= 0 for part in self.cache.parts]
        return merge_partials(
            [self._attend_pages(query, torch.where(own, selected.ids, -1), scale) for own in mine]
        ).out

    def _attend_pages(self, query: Tensor, slots: Tensor, scale: float) -> Partial:
        """Over rows of this rank's pages; rows of other shards are holes, in the columns they have."""
        pool = self.cache.mla_rows.pages[self.layer]
        return Partial(*sparse_mla_decode(query, pool, slots, row_format=self.cache.mla, scale=scale))

    def _decode_rows(self, block: RowBlock) -> slice:
        """A decode block's rows counted from the first decode row."""
        first = self.step.prompt.rows
        return slice(block.rows.start - first, block.rows.stop - first)

    def prompt_sequence(self, request: int) -> Tensor:
        """All rows of one prompt, float32 [context + new, latent + rope], for the dense path. Local."""
        if self._context is None:
            raise ValueError(f"layer {self.layer}: the step has no prompt, or the context was left")
        lens = self.step.prompt.lens
        start = int(lens[:request].sum())
        return self._context[start : start + int(lens[request])].float()


def _on_gpu(x: Tensor) -> bool:
    return triton_obstacle(x.device) is None
