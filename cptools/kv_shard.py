"""Decode context parallelism: the cached rows of each sequence spread round robin over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.collectives import all_gather_rows, as_byte_rows, group_coordinates
from cptools.host_copy import to_device
from cptools.kernels.selected_slots import selected_slots
from cptools.layout import KVLayout

_Int64 = npt.NDArray[np.int64]

_CACHE_BLOCK = 65536


class RoundRobinKVShard:
    """Slots, local indices and the gathered context of one rank's shard of the KV cache, by a `KVLayout`.

    Args:
        group: the ranks over which one copy of the KV is split; gives (world_size, rank). Not owned. Needed by
            `gather_context` if there is more than one rank.
        world_size, rank: instead of a group, for everything else.
        interleave, page_size: of the layout.

    Raises:
        ValueError: neither or contradicting group and numbers, or sizes that are no layout.
    """

    layout: KVLayout
    rank: int

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        interleave: int = 1,
        page_size: int = 64,
    ) -> None:
        self.group = group
        self.world_size, self.rank = group_coordinates(group, world_size, rank)
        self.layout = KVLayout(self.world_size, interleave, page_size)

    def local_lens(self, seq_lens: Sequence[int] | Tensor) -> Tensor:
        """Rows of each sequence that this rank holds. Local, no sync.

        Args:
            seq_lens: tokens of each sequence, any shape.

        Returns:
            int64, shape and device of seq_lens.

        Raises:
            ValueError: a length that is no integer or, unless on a GPU, negative.
        """
        lens = _as_lengths(seq_lens)
        if lens.device.type == "cpu" and lens.numel() and int(lens.min()) < 0:
            raise ValueError(f"seq_lens holds {int(lens.min())}, lengths must be >= 0")
        return self.layout.local_len(lens, self.rank)

    def slot_mapping(self, positions: Tensor, request_ids: Tensor, block_tables: Tensor) -> Tensor:
        """Where in this rank's pages each token's row is stored. Local, no sync.

        slot = block_tables[request, local_index // page_size] * page_size + local_index % page_size

        On the CPU bad input raises on all ranks alike: every token is checked, also those that another rank owns. On a
        GPU nothing is checked, since that would synchronise, and a token outside its table gets -1.

        Args:
            positions: [T] absolute positions, integers; -1 is padding, whose request id is not looked at.
            request_ids: [T] row of block_tables of each token, integers.
            block_tables: [R, blocks] page ids, the same on all ranks, integers; -1 where a request has no page.

        Returns:
            int64 [T], -1 for padding and where another rank owns the token.

        Raises:
            ValueError: shapes or devices that do not fit, no integers; on the CPU also a position < -1 or beyond the
                table, a request id outside [0, R), or a token whose page id is negative.
        """
        positions, request_ids = torch.as_tensor(positions), torch.as_tensor(request_ids)
        block_tables = torch.as_tensor(block_tables)
        if positions.dim() != 1 or request_ids.shape != positions.shape or block_tables.dim() != 2:
            raise ValueError(
                f"slot_mapping needs positions [T], request_ids [T], block_tables [R, blocks], got "
                f"{tuple(positions.shape)}, {tuple(request_ids.shape)}, {tuple(block_tables.shape)}"
            )
        if not positions.device == request_ids.device == block_tables.device:
            raise ValueError(
                f"positions, request_ids and block_tables are on "
                f"{positions.device}, {request_ids.device}, {block_tables.device}"
            )
        _check_integers("positions", positions)
        _check_integers("request_ids", request_ids)
        _check_integers("block_tables", block_tables)
        if positions.device.type != "cpu":
            return self._slots_unchecked(positions.long(), request_ids.long(), block_tables.long())
        # numpy divides integers by a scalar several times faster than torch, and blocks stay in the cache.
        t, request, tables = positions.long().numpy(), request_ids.long().numpy(), block_tables.contiguous().numpy()
        slots = np.empty(t.shape, np.int64)
        for start in range(0, len(t), _CACHE_BLOCK):
            part = slice(start, start + _CACHE_BLOCK)
            slots[part] = self._slots(t[part], request[part], tables)
        return torch.from_numpy(slots)

    def localize(self, topk: Tensor, seq_lens: Tensor | None = None) -> Tensor:
        """Global positions of selected tokens -> this rank's local indices. Local, no sync.

        Columns stay where they are: what is not this rank's becomes a hole. No page is involved; see `KVLayout`.

        Args:
            topk: [rows, K] (any leading shape) positions, integers; negative means none.
            seq_lens: [rows] integers: positions at or beyond the length of their row become -1. One per *row*, so a
                request that verifies drafts brings a length for each of its rows.

        Returns:
            int64 like topk; -1 where a position is negative, beyond its row's length, or another rank's.

        Raises:
            ValueError: shapes or devices that do not fit, or no integers.
        """
        topk = torch.as_tensor(topk)
        _check_integers("topk", topk)
        if seq_lens is not None:
            seq_lens = torch.as_tensor(seq_lens)
            _check_integers("seq_lens", seq_lens)
            if seq_lens.shape != topk.shape[:-1] or seq_lens.device != topk.device:
                raise ValueError(
                    f"seq_lens must hold one length per row of topk {tuple(topk.shape)} on {topk.device}, "
                    f"got {tuple(seq_lens.shape)} on {seq_lens.device}"
                )
        t = topk.long()
        if t.device.type == "cpu":
            positions = t.numpy()
            owner = torch.from_numpy(self.layout.owner(positions))
            local = torch.from_numpy(self.layout.local_index(positions))
        else:
            owner, local = self.layout.owner(t), self.layout.local_index(t)
        mine = (t >= 0) & (owner == self.rank)
        if seq_lens is not None:
            mine &= t < seq_lens.unsqueeze(-1)
        return torch.where(mine, local, -1)

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        """Every rank's columns beside each other: [rows, C] -> [rows, N * C], rank after rank. Collective: one
        all-gather, on all ranks with the same shape. With one rank it is `candidates` itself.

        For what each shard nominates for a row: top-k candidates as the keys of `cptools.kernels.topk_select`.

        Raises:
            ValueError: more than one rank and no group.
        """
        if self.world_size == 1:
            return candidates
        if self.group is None:
            raise ValueError(f"gather_candidates over world_size={self.world_size} ranks needs group=")
        rows = candidates.shape[0]
        gathered = all_gather_rows(candidates, [rows] * self.world_size, group=self.group)
        columns = candidates.shape[1]
        return gathered.view(self.world_size, rows, columns).transpose(0, 1).reshape(rows, self.world_size * columns)

    def gather_context(
        self, rows_local: Tensor, seq_lens: Sequence[int] | Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Bring the shards of whole sequences together, in position order. Collective: one all-gather.

        Args:
            rows_local: [sum of this rank's local lengths, ...] of any dtype: request after request, local index order.
            seq_lens: [R] tokens of each sequence, the same on all ranks; 0 is legal. A tensor on a GPU costs a sync.
            out: [sum(seq_lens), ...] written and returned, if given; must not overlap rows_local.

        Returns:
            [sum(seq_lens), ...] request after request, position order, the same on all ranks.

        Raises:
            ValueError: rows_local does not have the rows, out does not fit in shape, dtype, device or is not
                contiguous, a negative length, or more than one rank and no group.
        """
        lens = _as_lengths(seq_lens).cpu().numpy()
        if lens.ndim != 1 or (lens < 0).any():
            raise ValueError(f"seq_lens must be one-dimensional and >= 0, got {lens.tolist()}")
        local_lens: _Int64 = self.layout.local_len(lens[:, None], np.arange(self.world_size, dtype=np.int64))
        counts = local_lens.sum(axis=0).tolist()
        if rows_local.dim() < 1 or rows_local.shape[0] != counts[self.rank]:
            raise ValueError(
                f"rows_local has shape {tuple(rows_local.shape)}, but rank {self.rank} of {self.world_size} holds "
                f"{counts[self.rank]} rows of seq_lens={lens.tolist()}"
            )
        shape = (int(lens.sum()), *rows_local.shape[1:])
        if out is None:
            out = rows_local.new_empty(shape)
        elif (out.shape, out.dtype, out.device) != (shape, rows_local.dtype, rows_local.device):
            raise ValueError(
                f"out must be {rows_local.dtype} {shape} on {rows_local.device}, "
                f"got {out.dtype} {tuple(out.shape)} on {out.device}"
            )
        elif not out.is_contiguous():
            raise ValueError(f"out must be contiguous, got strides {out.stride()} for shape {shape}")
        if self.world_size == 1:
            return out.copy_(rows_local)
        if self.group is None:
            raise ValueError(f"gather_context over world_size={self.world_size} ranks needs group=")
        rank_major = all_gather_rows(rows_local, counts, group=self.group)
        order = to_device(torch.from_numpy(self._position_order(lens, local_lens)), out.device)
        torch.index_select(as_byte_rows(rank_major), 0, order, out=as_byte_rows(out))
        return out

    def _slots(self, t: _Int64, request: _Int64, tables: npt.NDArray[np.integer]) -> _Int64:
        real = t >= 0
        if not real.all():
            if t.min() < -1:
                raise ValueError(f"position {t.min()} of request {request[t.argmin()]}: must be >= -1")
            slots = np.full(t.shape, -1)
            if real.any():
                slots[real] = self._slots(t[real], request[real], tables)
            return slots
        requests, blocks = tables.shape
        if request.min() < 0 or request.max() >= requests:
            wrong = request.min() if request.min() < 0 else request.max()
            raise ValueError(f"request id {wrong} is outside block_tables of {requests} requests")
        page = t // self.layout.virtual_block
        if page.max() >= blocks:
            i = page.argmax()
            raise ValueError(
                f"position {t[i]} of request {request[i]} needs block {page[i]}, but its table has {blocks} blocks "
                f"of {self.layout.virtual_block} positions"
            )
        page_id = tables.take(request * blocks + page).astype(np.int64, copy=False)
        if page_id.min() < 0:
            i = page_id.argmin()
            raise ValueError(
                f"position {t[i]} of request {request[i]} needs block {page[i]}, but its page id is {page_id[i]}"
            )
        # local_index // page_size is the page itself: page * page_size + offset = local_index.
        slots = (page_id - page) * self.layout.page_size + self.layout.local_index(t)
        return np.where(self.layout.owner(t) == self.rank, slots, -1)

    def _slots_unchecked(self, t: Tensor, request: Tensor, tables: Tensor) -> Tensor:
        slots = torch.empty_like(t)
        selected_slots(slots.unsqueeze(1), t.unsqueeze(1), request, tables, layout=self.layout, rank=self.rank)
        return slots

    def _position_order(self, lens: _Int64, local_lens: _Int64) -> _Int64:
        """Where each row of a context lies among all ranks' rows, rank-major; `local_lens` is [R, N]."""
        per_block = local_lens.T.ravel()
        begin = (per_block.cumsum() - per_block).reshape(self.world_size, -1)
        position = np.arange(lens.sum()) - (lens.cumsum() - lens).repeat(lens)
        request = np.arange(len(lens)).repeat(lens)
        return begin[self.layout.owner(position), request] + self.layout.local_index(position)


def _as_lengths(seq_lens: Sequence[int] | Tensor) -> Tensor:
    lens = torch.as_tensor(seq_lens)
    if lens.numel():
        _check_integers("seq_lens", lens)
    return lens.long()


def _check_integers(name: str, x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {x.dtype}")
