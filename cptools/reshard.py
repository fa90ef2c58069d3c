"""Move cached rows from one layout to another, as a plan of strided runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cptools.integers import require_int
from cptools.layout import KVLayout


@dataclass(frozen=True)
class Run:
    """`count` rows: (src_rank, src_index + i * src_stride) goes to (dst_rank, dst_index + i * dst_stride).

    Indices are local indices of the sequence on that rank (`KVLayout.local_index`). A run of one row has strides 1.
    """

    src_rank: int
    src_index: int
    src_stride: int
    dst_rank: int
    dst_index: int
    dst_stride: int
    count: int


def plan_reshard(src: KVLayout, dst: KVLayout, start: int, stop: int) -> tuple[Run, ...]:
    """Runs that move the rows of the positions [start, stop) of one sequence from layout `src` to layout `dst`.

    Every position moves exactly once. The runs are sorted by (src_rank, dst_rank, src_index), and there are as few as
    possible for rows taken in position order per pair of ranks: N ranks with round robin to one rank are N runs. Both
    sides compute the same plan and keep the runs of their own rank. Page sizes may differ; they play no role.

    Local, no communication; time and memory grow with stop - start. The idea of a plan that both sides derive from the
    two layouts is that of Megatron's `kv_reshard`.

    Raises:
        ValueError: start or stop is no integer, start is negative or greater than stop.
    """
    start, stop = require_int("start", start), require_int("stop", stop)
    if not 0 <= start <= stop:
        raise ValueError(f"start={start}, stop={stop}: 0 <= start <= stop is needed")
    if start == stop:
        return ()
    position = np.arange(start, stop, dtype=np.int64)
    src_rank, dst_rank = src.owner(position), dst.owner(position)
    pair = src_rank * dst.world_size + dst_rank
    # Stable, so that within a pair positions, hence the local indices on both sides, ascend.
    order = pair.argsort(kind="stable")
    pair, position = pair[order], position[order]
    src_index, dst_index = src.local_index(position), dst.local_index(position)

    first = _run_starts(pair, src_index, dst_index)
    count = np.diff(first, append=len(position))
    second = np.minimum(first + 1, len(position) - 1)
    src_stride = np.where(count > 1, src_index[second] - src_index[first], 1)
    dst_stride = np.where(count > 1, dst_index[second] - dst_index[first], 1)
    columns = (
        src_rank[order][first],
        src_index[first],
        src_stride,
        dst_rank[order][first],
        dst_index[first],
        dst_stride,
        count,
    )
    return tuple(Run(*row) for row in np.stack(columns, axis=1).tolist())


def _run_starts(
    pair: npt.NDArray[np.int64], src_index: npt.NDArray[np.int64], dst_index: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Cut rows sorted by pair of ranks in the fewest runs of one pair and constant strides; returns their first rows.

    Longest run first from the left is optimal, as each part of a run is a run. A row is a break when it does not go on
    from the two before it. As any two rows of a pair make a run, a run ends at the first break that is two or more rows
    after its start: of adjacent breaks every other one starts a run, counted anew at each new pair.
    """
    new_pair = np.diff(pair, prepend=-1) != 0
    go_on = np.zeros(len(pair), dtype=bool)
    go_on[2:] = (pair[2:] == pair[:-2]) & (np.diff(src_index, n=2) == 0) & (np.diff(dst_index, n=2) == 0)
    breaks = np.flatnonzero(~go_on)
    new_series = new_pair[breaks] | (np.diff(breaks, prepend=-2) > 1)
    index = np.arange(len(breaks))
    series_start = np.maximum.accumulate(np.where(new_series, index, 0))
    starts: npt.NDArray[np.int64] = breaks[(index - series_start) % 2 == 0]
    return starts
