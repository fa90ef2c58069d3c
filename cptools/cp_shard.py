"""Prefill context parallelism: the new tokens of a step spread over the ranks of a group, and brought back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.collectives import all_gather_rows, group_coordinates, require_agreement
from cptools.cp_plan import STRATEGIES, CPPlan, make_cp_plan
from cptools.host_copy import to_device


class LoadBalancedCPShard:
    """Moves tensors of prompt tokens between packed order and the rows of each rank, by a `CPPlan`.

    For the plans of all ranks of one step, unshard(shard(x)) == x for any dtype and any lengths. Which rank gets which
    token, and why: `make_cp_plan`.

    Args:
        group: the ranks that share the prompts; gives (world_size, rank). Not owned. Needed by the collective methods
            if there is more than one rank.
        world_size, rank: instead of a group, for planning and `shard` alone.
        strategy: "zigzag" or "interleave".
        check_plans: before each collective, compare the plans of all ranks and raise on all of them where they differ.
            For debugging: it costs an all-gather and a sync. Without it, ranks that disagree on the lengths get wrong
            rows, or fail in the transfer.

    Raises:
        ValueError: neither or contradicting group and numbers, or no such strategy.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        strategy: str = "zigzag",
        check_plans: bool = False,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} must be one of {STRATEGIES}")
        self.group = group
        self.world_size, self.rank = group_coordinates(group, world_size, rank)
        self.strategy = strategy
        self.check_plans = check_plans

    def plan(self, query_lens: Sequence[int] | Tensor, context_lens: Sequence[int] | Tensor | None = None) -> CPPlan:
        """This rank's plan of a step: R requests with so many new and so many cached tokens. Local."""
        return make_cp_plan(
            query_lens, context_lens, world_size=self.world_size, rank=self.rank, strategy=self.strategy
        )

    def shard(self, x: Tensor, plan: CPPlan, *, dim: int = 0) -> Tensor:
        """Packed order -> this rank's rows, as a new tensor. Local, no sync.

        Args:
            x: T tokens along `dim`, any dtype; the same on all ranks.

        Returns:
            plan.counts[rank] rows along `dim`, row j for the token at plan.positions[j].

        Raises:
            ValueError: the plan is another rank's or world's, or x does not have its T tokens.
        """
        self._check(plan, x, dim, plan.num_tokens)
        return x.index_select(dim, to_device(plan.token_index, x.device))

    def unshard(self, x_local: Tensor, plan: CPPlan, *, dim: int = 0) -> Tensor:
        """This rank's rows -> all T tokens in packed order, on every rank. Collective: one all-gather.

        Args:
            x_local: plan.counts[rank] rows along `dim`, any dtype.

        Raises:
            ValueError: the plan is another rank's or world's, x_local does not have its rows, or more than one rank
                and no group.
        """
        self._check(plan, x_local, dim, plan.counts[self.rank])
        rows = self._gather(x_local.movedim(dim, 0), plan.counts, plan)
        return rows.index_select(0, to_device(plan.restore_index, rows.device)).movedim(0, dim)

    def unshard_rows(self, x_local: Tensor, plan: CPPlan, packed_index: Sequence[int] | Tensor) -> Tensor:
        """Only some tokens of `unshard`, on every rank: the last of each request for its logits, say.

        Collective: one all-gather of just these rows.

        Args:
            x_local: [plan.counts[rank], ...] of any dtype.
            packed_index: [n] packed indices in [0, T), the same list on all ranks; in any order, also repeated. A
                tensor on a GPU costs a sync.

        Returns:
            [n, ...] in the order asked for.

        Raises:
            ValueError: as `unshard`, or an index outside [0, T).
        """
        self._check(plan, x_local, 0, plan.counts[self.rank])
        wanted = _as_index(packed_index, plan.num_tokens)
        stops = torch.tensor(plan.counts).cumsum(0)
        rank_major = plan.restore_index[wanted]
        owner = torch.searchsorted(stops, rank_major, right=True)
        own_rows = rank_major[owner == self.rank] - (stops[self.rank] - plan.counts[self.rank])
        counts = owner.bincount(minlength=self.world_size).tolist()
        rows = self._gather(x_local.index_select(0, to_device(own_rows, x_local.device)), counts, plan)
        # The rows arrive sorted by owner, the order asked for kept within each.
        arrival = owner.argsort(stable=True).argsort()
        return rows.index_select(0, to_device(arrival, rows.device))

    def gather_rank_major(self, x_local: Tensor, plan: CPPlan) -> Tensor:
        """All ranks' rows on every rank, rank after rank: `unshard` in order of arrival. Collective: one all-gather.

        Args and errors as in `unshard`, along dim 0.
        """
        self._check(plan, x_local, 0, plan.counts[self.rank])
        return self._gather(x_local, plan.counts, plan)

    def _gather(self, rows: Tensor, counts: Sequence[int], plan: CPPlan) -> Tensor:
        if self.world_size == 1:
            return rows
        if self.group is None:
            raise ValueError(f"a collective over world_size={self.world_size} ranks needs group=")
        if self.check_plans:
            identity = (plan.strategy, plan.query_lens, plan.context_lens, rows.dtype, tuple(rows.shape[1:]))
            require_agreement("the plan (strategy, query_lens, context_lens) or row", identity, group=self.group)
        return all_gather_rows(rows, counts, group=self.group)

    def _check(self, plan: CPPlan, x: Tensor, dim: int, rows: int) -> None:
        if (plan.world_size, plan.rank) != (self.world_size, self.rank):
            raise ValueError(
                f"plan is for rank {plan.rank} of {plan.world_size}, this is rank {self.rank} of {self.world_size}"
            )
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != rows:
            raise ValueError(f"x has shape {tuple(x.shape)}, but the plan needs {rows} rows along dim {dim}")


def _as_index(packed_index: Sequence[int] | Tensor, tokens: int) -> Tensor:
    index = torch.as_tensor(packed_index, device="cpu")
    if index.numel() == 0 and index.dim() == 1:
        return index.long()
    # A mask, too, would pass for numbers.
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"packed_index must be int64 or int32 [n], got {index.dtype} {tuple(index.shape)}")
    if int(index.min()) < 0 or int(index.max()) >= tokens:
        raise ValueError(f"packed_index {int(index.min())}..{int(index.max())} is outside the plan's {tokens} tokens")
    return index.long()
