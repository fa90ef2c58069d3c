"""Selected rows that the GPU may not hold: resident, hot, or to be fetched from host memory into a hot region."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..impl import Choice, choose
from . import reference

__all__ = ["FetchPlan", "HotRegions", "choose_resolve_hot_rows", "fetch_rows", "resolve_hot_rows"]


@dataclass(frozen=True)
class HotRegions:
    """What each hot region holds, for all layers that share a selection: S regions of H rows.

    Attributes:
        held: int64 [S, H], the local index of the row in each hot slot, -1 = none; no index twice.
        order: int32 [S, H], the hot slots, the one used longest ago first: a permutation of 0 ... H - 1.
    """

    held: Tensor
    order: Tensor

    @classmethod
    def empty(cls, regions: int, hot_rows: int, device: torch.device | str = "cpu") -> HotRegions:
        held = torch.full((regions, hot_rows), -1, dtype=torch.int64, device=device)
        slots = torch.arange(hot_rows, dtype=torch.int32, device=device)
        return cls(held, slots.expand(regions, hot_rows).clone())

    def clear_(self, region: int) -> None:
        """Empty a region, for its next request. No sync."""
        self.held[region] = -1
        self.order[region] = torch.arange(self.order.shape[1], dtype=torch.int32, device=self.order.device)


@dataclass(frozen=True)
class FetchPlan:
    """Where selected rows are once the misses have been fetched. Every layer that shares the selection replays it.

    Attributes:
        slots: int64 [R, Q, K], row of the cache for each selected row; -1 where there is none.
        sources, targets: int64 [R, Q * K], host row and cache row of each miss, in the order in which the rows and
            columns first name them; -1 behind the last.
        counts: int64 [R, 2], distinct hot hits and misses of each request.
    """

    slots: Tensor
    sources: Tensor
    targets: Tensor
    counts: Tensor


def resolve_hot_rows(
    selected: Tensor,
    regions: Tensor,
    state: HotRegions,
    *,
    gpu_tables: Tensor,
    host_tables: Tensor,
    hot_tables: Tensor,
    page_size: int,
    impl: str = "auto",
) -> FetchPlan:
    """Find the selected rows of R requests, Q query rows each, and give those that must come a place. `state` changes.

    The rows of a request are resolved together, so that none makes room at the cost of another. Of each local index:

    1. negative, or beyond both tables: -1.
    2. its GPU page is there: that row. Regions know nothing of it.
    3. no host page either, or the request has no region: -1.
    4. held by the region: a hit, that hot slot.
    5. else a miss. The i-th distinct one, in (row, column) order of first reference, takes the i-th oldest hot slot
       that is no hit.

    The order left behind: slots that were neither hit nor taken, then those taken in the order of the misses, then
    the hits; the first and the last in their order from before. Nothing but resident rows changes nothing.

    Local, on the current stream. The reference waits for the GPU.

    Args:
        selected: int64 [R, Q, K] local indices on this rank of the positions that each row selects; any may come again,
            -1 anywhere. A request of padding has nothing but -1.
        regions: integers [R], the region of each request, no region twice; -1 = none.
        gpu_tables, host_tables: integers [R, blocks] page ids; -1 = not there.
        hot_tables: integers [R, hot pages] page ids of the cache: hot slot h is row h % page_size of page
            h // page_size of them.

    Raises:
        ValueError: shapes that do not fit, or hot rows fewer than Q * K; the reference also for a region that is not
            there or comes twice.
    """
    if selected.dim() != 3 or regions.shape != selected.shape[:1]:
        raise ValueError(
            f"resolve_hot_rows: want selected [R, Q, K] and regions [R], got {tuple(selected.shape)}, "
            f"{tuple(regions.shape)}"
        )
    requests, rows, columns = selected.shape
    tables = {"gpu_tables": gpu_tables, "host_tables": host_tables, "hot_tables": hot_tables}
    for name, table in tables.items():
        if table.dim() != 2 or table.shape[0] != requests:
            raise ValueError(f"resolve_hot_rows: {name} must be [{requests}, pages], got {tuple(table.shape)}")
    hot_rows = state.held.shape[1]
    if hot_rows < rows * columns or hot_tables.shape[1] * page_size < hot_rows:
        raise ValueError(
            f"resolve_hot_rows: {rows} x {columns} rows may be wanted at once of {hot_rows} hot rows in "
            f"{hot_tables.shape[1]} pages of {page_size}"
        )
    choose_resolve_hot_rows(impl=impl)
    used = sorted(region for region in regions.tolist() if region >= 0)
    if used and (used[-1] >= state.held.shape[0] or len(set(used)) < len(used)):
        raise ValueError(f"resolve_hot_rows: regions {used} of {state.held.shape[0]}, each may be used once")
    made = reference.resolve_hot_rows(
        selected, regions, state.held, state.order, gpu_tables, host_tables, hot_tables, page_size=page_size
    )
    return FetchPlan(*made)


def fetch_rows(plan: FetchPlan, host: Tensor, cache: Tensor) -> None:
    """Write the misses' rows of one layer into its cache: uint8 host [host rows, bytes] -> cache [cache rows, bytes].

    Local. The reference waits for the GPU.
    """
    wanted = plan.targets >= 0
    rows = host[plan.sources[wanted].to(host.device)]
    cache[plan.targets[wanted].to(cache.device)] = rows.to(cache.device)


def choose_resolve_hot_rows(*, impl: str = "auto") -> Choice:
    """What `resolve_hot_rows` would run, and why nothing faster."""
    return choose("resolve_hot_rows", impl, {})
