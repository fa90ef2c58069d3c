"""Replicas of an engine that share something, and so must take every step together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from cptools.collectives import all_gather_ints, group_coordinates
from cptools.integers import require_int

_REFUSED = -1


class Lockstep:
    """The agreement that replicas reach before each step: how much work the busiest has, or that one of them refused.

    Data-parallel replicas whose experts are spread over all of them issue the same collectives, also where one has no
    tokens, although each knows only its own requests. A replica that finds its input wrong says so instead of leaving
    the others to wait::

        with lockstep.checks():
            plan = make_plan(requests)          # may raise
        busiest = lockstep.most(plan.rows)      # raises on the other replicas if it did

    Args:
        group: one rank of each replica, those at the same place; None for a replica that depends on no other, whose
            agreement is its own value.
    """

    def __init__(self, *, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.world_size, self.rank = (1, 0) if group is None else group_coordinates(group, None, None)

    def most(self, amount: int) -> int:
        """The largest `amount` of all replicas. Collective: one all-gather of 8 bytes a rank and a sync; none with one.

        Raises:
            ValueError: amount < 0, or, naming them, replicas that left `checks` with an error instead.
        """
        amount = require_int("amount", amount, minimum=0)
        amounts = self._exchange(amount)
        if refused := [replica for replica, other in enumerate(amounts) if other == _REFUSED]:
            raise ValueError(f"replicas {refused} of {self.world_size} refused this step, so no other can take it")
        return max(amounts)

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Everything before `most` that may raise. Collective, as `most` in its place, where it does; else local."""
        try:
            yield
        except Exception:
            self._exchange(_REFUSED)
            raise

    def _exchange(self, value: int) -> list[int]:
        return [value] if self.group is None or self.world_size == 1 else all_gather_ints(value, group=self.group)
