"""Expert parallelism: rows travel to the ranks that hold their experts, and the experts' results come back.

A mixture of experts with E experts over N ranks: rank r holds experts r * E / N to (r + 1) * E / N. One exchange is

    counts      one all-to-all of 24 bytes a rank, then the one host sync: the sizes of what follows
    rows        one all-to-all; a row that goes to several experts of a rank travels there once
    results     one all-to-all; one row for each (token, expert), so that the token's rank adds them in its own order

Nothing is padded: a rank receives exactly the rows routed to it, and may receive or send none. The row groups follow
the layout that grouped matrix products take (as in MegaBlocks and DeepEP).

Rows that every rank holds alike, as in decode, need not travel: `own_rows` takes those of a rank's own experts, without
a sync, and what the ranks make of them is added up by an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.collectives import all_to_all_rows, as_byte_rows, from_byte_rows, group_coordinates
from cptools.integers import require_int, undivided
from cptools.kernels.expert_routing import group_by_expert


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Rows routed to this rank's experts, and the way back. Made by `ExpertExchange.dispatch`, or `own_rows`."""

    rows: Tensor
    """[P, D], grouped: those of this rank's first expert, then of its second, and so on. Within an expert by source
    rank, then token."""
    counts: Tensor
    """int32 [E / N], rows of each expert, on the device of the rows; they add up to P."""
    arrival: Tensor
    """int64 [P]: the row of each pair as they arrived, in which order results go back."""
    slots: Tensor
    """int64 [T, K]: where the result of each (token, column) of this rank stands in what `results` returns."""
    pairs_sent: list[int]
    """(token, expert) pairs of this rank on each rank; on the host."""
    pairs_received: list[int]
    """Pairs of each rank on this one; they add up to P. On the host."""


class ExpertExchange:
    """Dispatches rows to the ranks of their experts and brings the results back.

    results(outputs, sent)[sent.slots] is [T, K, D], the output of the expert in each column, whatever the split. With
    one rank both methods are local, and group the rows in the same way without a sync.

    Memory: with at most T rows a rank in one exchange, rows of b bytes and K columns, a rank receives at most
    `received_bytes(T, K, b)`, and holds at most `pairs(T, K)` rows each of grouped inputs and of outputs, however the
    router chose: all ranks may send all their rows to one. Even routing makes T * K pairs. A caller bounds it by
    exchanging blocks of its rows; all ranks must make equally many exchanges, with no rows where a rank has none left.

    Args:
        num_experts: E, in all.
        group: the ranks that hold the experts; gives (world_size, rank). Not owned. Needed by the collective methods
            if there is more than one rank.
        world_size, rank: instead of a group, for planning.

    Raises:
        ValueError: neither or contradicting group and numbers, or ranks that do not divide the experts.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        group: ProcessGroup | None = None,
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.group = group
        self.world_size, self.rank = group_coordinates(group, world_size, rank)
        self.num_experts = require_int("num_experts", num_experts, minimum=1)
        if faults := undivided("world_size", self.world_size, {"num_experts": num_experts}):
            raise ValueError(faults[0])
        self.experts_per_rank = self.num_experts // self.world_size

    @property
    def local_experts(self) -> range:
        """Experts of this rank."""
        return range(self.rank * self.experts_per_rank, (self.rank + 1) * self.experts_per_rank)

    def pairs(self, tokens: int, columns: int) -> int:
        """The most (token, expert) pairs that a rank may have to compute when each rank brings at most that many."""
        return self.world_size * tokens * min(columns, self.experts_per_rank)

    def received_bytes(self, tokens: int, columns: int, row_bytes: int) -> int:
        """The most bytes of rows that a rank may receive in a dispatch when each rank brings at most that many tokens.

        On top of them come the results for its own tokens: tokens * columns * row_bytes.
        """
        return self.world_size * tokens * (row_bytes + 4 * columns)

    def dispatch(self, x: Tensor, experts: Tensor) -> ExpertRows:
        """Bring each row to the ranks of its experts. Collective: two all-to-alls and one sync; local with one rank.

        Args:
            x: [T, D] of any dtype; D and dtype are the same on all ranks, T may be 0.
            experts: int64 [T, K], K distinct experts in [0, E) of each row, in any order; K is the same on all ranks.

        Returns:
            The rows of all ranks for this rank's experts.

        Raises:
            ValueError: shapes that do not fit; more than one rank and no group; on all ranks alike, before rows travel,
                an id outside [0, E) (with one rank only on the CPU, since it takes a sync).
        """
        self._check(x, experts)
        if self.world_size == 1:
            return self._group_own(x, experts)
        group = self._collective("dispatch")
        tokens, columns = experts.shape
        owner = experts.div(self.experts_per_rank, rounding_mode="floor")
        ranks = torch.arange(self.world_size, device=experts.device)
        goes = owner.unsqueeze(2) == ranks  # [T, K, N]
        visits = goes.any(1)
        per_rank = torch.stack([visits.sum(0), goes.sum((0, 1)), goes.new_zeros(self.world_size, dtype=torch.int64)], 1)
        per_rank[:, 2] = tokens * columns - per_rank[:, 1].sum()
        rows_sent, pairs_sent, rows_received, pairs_received = self._exchange_counts(per_rank, group)

        # Both sorts are stable: by rank, then token (and column).
        rank_major = torch.argsort((~visits.t()).flatten().byte(), stable=True)[: sum(rows_sent)]
        token = rank_major % max(tokens, 1)
        destination = rank_major.div(max(tokens, 1), rounding_mode="floor").unsqueeze(1)
        local_ids = torch.where(owner[token] == destination, experts[token] - destination * self.experts_per_rank, -1)
        parcel = torch.cat([as_byte_rows(x[token]), as_byte_rows(local_ids.int())], dim=1)
        arrived = all_to_all_rows(parcel, rows_sent, rows_received, group=group)
        split = arrived.shape[1] - 4 * columns
        rows = from_byte_rows(arrived[:, :split], x)
        ids = from_byte_rows(arrived[:, split:], local_ids.int()).flatten()

        # The pairs for this rank, as they arrived: by source rank, then token, then column.
        pairs = torch.argsort((ids < 0).byte(), stable=True)[: sum(pairs_received)]
        groups = group_by_expert(ids[pairs].unsqueeze(1), self.experts_per_rank)
        return ExpertRows(
            rows=rows[pairs[groups.order].div(columns, rounding_mode="floor")],
            counts=groups.counts,
            arrival=groups.slots.flatten(),
            slots=_inverse(torch.argsort(owner.flatten(), stable=True)).view(tokens, columns),
            pairs_sent=pairs_sent,
            pairs_received=pairs_received,
        )

    def own_rows(self, x: Tensor, experts: Tensor) -> ExpertRows:
        """Rows for this rank's experts out of rows that all ranks hold alike. Local, no sync, capturable.

        Args:
            x: [T, D] of any dtype. experts: int64 [T, K].

        Returns:
            As `dispatch`, but [T * K, D] rows, of which only the first sum(counts) are for this rank. The slots of
            pairs of other ranks' experts are all the last row, which is none of these where there is such a pair.

        Raises:
            ValueError: shapes that do not fit.
        """
        self._check(x, experts)
        first = self.rank * self.experts_per_rank
        mine = (experts >= first) & (experts < first + self.experts_per_rank)
        ids = torch.where(mine, experts - first, self.experts_per_rank)
        groups = group_by_expert(ids, self.experts_per_rank + 1)
        return ExpertRows(
            rows=x[groups.order.div(experts.shape[1], rounding_mode="floor")],
            counts=groups.counts[:-1],
            arrival=groups.slots.flatten(),
            slots=torch.where(mine, groups.slots, ids.numel() - 1),
            pairs_sent=[],
            pairs_received=[],
        )

    def results(self, outputs: Tensor, sent: ExpertRows) -> Tensor:
        """Bring the experts' outputs back. Collective: one all-to-all, no sync; local with one rank.

        Args:
            outputs: [P, D], row i the output for sent.rows[i]; D and dtype are the same on all ranks.
            sent: what `dispatch` returned.

        Returns:
            [T * K, D], of this rank's own rows; sent.slots names them. With one rank it is `outputs`.

        Raises:
            ValueError: outputs has not the rows of sent, or more than one rank and no group.
        """
        if outputs.dim() != 2 or outputs.shape[0] != sent.rows.shape[0]:
            raise ValueError(f"outputs has shape {tuple(outputs.shape)} for {sent.rows.shape[0]} rows")
        if self.world_size == 1:
            return outputs
        group = self._collective("results")
        return all_to_all_rows(outputs[sent.arrival], sent.pairs_received, sent.pairs_sent, group=group)

    def _group_own(self, x: Tensor, experts: Tensor) -> ExpertRows:
        ids = experts.flatten()
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_experts:
            raise ValueError(f"experts in [{int(ids.min())}, {int(ids.max())}], there are {self.num_experts}")
        groups = group_by_expert(experts, self.num_experts)
        return ExpertRows(
            rows=x[groups.order.div(experts.shape[1], rounding_mode="floor")],
            counts=groups.counts,
            arrival=groups.slots.flatten(),
            slots=groups.slots,
            pairs_sent=[len(ids)],
            pairs_received=[len(ids)],
        )

    def _exchange_counts(self, per_rank: Tensor, group: ProcessGroup) -> tuple[list[int], ...]:
        """int64 [N, 3], rows and pairs for each rank and pairs for none -> rows, pairs sent, rows, pairs received."""
        ones = [1] * self.world_size
        received = all_to_all_rows(per_rank, ones, ones, group=group)
        both = torch.cat([per_rank[:, :2], received], dim=1).t().tolist()
        if wrong := [rank for rank, pairs in enumerate(both.pop()) if pairs]:
            raise ValueError(f"ranks {wrong} have experts outside [0, {self.num_experts})")
        return tuple(both)

    def _check(self, x: Tensor, experts: Tensor) -> None:
        if x.dim() != 2 or experts.dim() != 2 or experts.shape[0] != x.shape[0] or experts.dtype != torch.int64:
            raise ValueError(
                f"an exchange needs x [T, D], experts int64 [T, K], got {tuple(x.shape)}, "
                f"{experts.dtype} {tuple(experts.shape)}"
            )

    def _collective(self, method: str) -> ProcessGroup:
        if self.group is None:
            raise ValueError(f"{method} over world_size={self.world_size} ranks needs group=")
        return self.group


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
