# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""How one warpgroup holds the scores of a tile of keys."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def scores_layout(queries: int) -> Any:
    """[TILE, queries] as the head sum of an MMA accumulator leaves it: two keys a thread, a query every 4 // queries
    lanes (the lanes between hold copies)."""
    lanes = [[0, 0], [0, 0]]
    if queries == 2:
        lanes = [[0, 0], [0, 1]]
    elif queries == 4:
        lanes = [[0, 1], [0, 2]]
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, queries],
    )
