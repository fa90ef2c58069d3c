"""Tensor parallelism: heads and feed-forward widths spread over the ranks of a group, and their parts put together."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.collectives import all_gather_rows, all_reduce_sum, group_coordinates


class TensorParallel:
    """What the ranks that split the heads of a model exchange. They hold the same rows, in the same order.

    Rank r of N owns heads r * H / N to (r + 1) * H / N. With one rank each method gives back what it was given.

    Args:
        group: the ranks that split the heads; gives (world_size, rank). Not owned. Needed by the collective methods if
            there is more than one rank.
        world_size, rank: instead of a group, for `own_heads` alone.

    Raises:
        ValueError: neither or contradicting group and numbers.
    """

    def __init__(
        self, *, group: ProcessGroup | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        self.group = group
        self.world_size, self.rank = group_coordinates(group, world_size, rank)

    def sum(self, partial: Tensor) -> Tensor:
        """Sum of the ranks' partial products, with the same bits on all of them. No sync.

        Collective: on the CPU one all-gather, whose parts are added in rank order in fp32 (fp64 if they are); on a GPU
        one all-reduce, whose order is NCCL's. None if there are no rows.

        Args:
            partial: [T, ...], the same shape and dtype on all ranks.

        Returns:
            [T, ...] in its dtype, rounded once on the CPU.

        Raises:
            ValueError: more than one rank and no group.
        """
        if self.world_size == 1:
            return partial
        group = self._collective("sum")
        if partial.device.type != "cpu":
            return all_reduce_sum(partial, group=group)
        first, *others = all_gather_rows(partial, [partial.shape[0]] * self.world_size, group=group).chunk(
            self.world_size
        )
        total = first.clone() if first.element_size() >= 4 else first.float()
        for other in others:
            total += other
        return total.to(partial.dtype)

    def gather_heads(self, x: Tensor) -> Tensor:
        """Each rank's own heads -> all heads on every rank. Collective: one all-gather; no sync.

        For attention over keys that no other rank of the group holds. own_heads(gather_heads(x)) == x.

        Args:
            x: [T, H / N, ...] of any dtype, the same shape on all ranks.

        Returns:
            [T, H, ...].

        Raises:
            ValueError: more than one rank and no group, or x has no heads dim.
        """
        if x.dim() < 2:
            raise ValueError(f"gather_heads needs [T, H / N, ...], got {tuple(x.shape)}")
        if self.world_size == 1:
            return x
        tokens, heads = x.shape[:2]
        rows = all_gather_rows(x, [tokens] * self.world_size, group=self._collective("gather_heads"))
        by_rank = rows.view(self.world_size, tokens, *x.shape[1:])
        return by_rank.transpose(0, 1).reshape(tokens, self.world_size * heads, *x.shape[2:])

    def own_heads(self, x: Tensor) -> Tensor:
        """[T, H, ...] -> the [T, H / N, ...] of this rank, as a view. Local.

        Raises:
            ValueError: N does not divide H.
        """
        if x.dim() < 2 or x.shape[1] % self.world_size:
            raise ValueError(f"own_heads: {tuple(x.shape)} has no heads for {self.world_size} ranks alike")
        return x.chunk(self.world_size, dim=1)[self.rank]

    def _collective(self, method: str) -> ProcessGroup:
        if self.group is None:
            raise ValueError(f"{method} over world_size={self.world_size} ranks needs group=")
        return self.group
