"""Rows that every rank of a group holds alike: each works on a share of them, and the results come back to all."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from cptools.collectives import all_gather_rows, group_coordinates
from cptools.integers import require_int


class SharedRows:
    """Divides rows among the ranks that would otherwise all do the same work on them, as torch.tensor_split does.

    collect(share(x), x.shape[0]) == x for any number of rows, also fewer than ranks and none.

    Args:
        group: the ranks that hold the rows alike; gives (world_size, rank). Not owned. Needed by `collect` if there is
            more than one rank.
        world_size, rank: instead of a group, for everything else.

    Raises:
        ValueError: neither or contradicting group and numbers.
    """

    def __init__(
        self, *, group: ProcessGroup | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        self.group = group
        self.world_size, self.rank = group_coordinates(group, world_size, rank)

    def counts(self, rows: int) -> list[int]:
        """Rows of each rank's share; they differ by at most one, longer ones first. Local."""
        rows = require_int("rows", rows, minimum=0)
        return [rows // self.world_size + (rank < rows % self.world_size) for rank in range(self.world_size)]

    def share(self, x: Tensor) -> Tensor:
        """[T, ...] -> this rank's consecutive rows, as a view. Local."""
        return x.tensor_split(self.world_size)[self.rank]

    def collect(self, own: Tensor, rows: int) -> Tensor:
        """Every rank's share -> all rows, on every rank. Collective: one all-gather, none if there are no rows.

        Args:
            own: [counts(rows)[rank], ...] of any dtype.
            rows: in all, the same on all ranks.

        Returns:
            [rows, ...]. With one rank it is `own`.

        Raises:
            ValueError: own has another number of rows, or more than one rank and no group.
        """
        counts = self.counts(rows)
        if own.shape[0] != counts[self.rank]:
            raise ValueError(f"rank {self.rank} of {self.world_size} shares {counts} rows, got {tuple(own.shape)}")
        if self.world_size == 1:
            return own
        if self.group is None:
            raise ValueError(f"collect over world_size={self.world_size} ranks needs group=")
        return all_gather_rows(own, counts, group=self.group)
