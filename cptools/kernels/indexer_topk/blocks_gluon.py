"""Fused selection over many keys: blocks of whole rows, scored while rows before them are selected from.

Blocks of scores stand in a ring: two streams score blocks in turn, so that the next one's programs follow on the last
ones of its predecessor, and a third one of higher priority selects, to free a block soon. So no launch waits for the
tail of another. Scores stand in groups beside their maxima, so that a selection reads few of them. A row is selected
from whole, so that no distribution of scores needs care.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import aligned
from ..topk_select.grouped_triton import GROUP, SPAN, GroupedSelection
from .grouped_gluon import GroupedScores

_ROWS = 4  # rows that a program scores at most
_BLOCK_SCORES = 16 << 20
_BLOCK_GROUPS = 10  # at least, where two blocks of so many fit: short launches cost more than a shallow ring
_SLOTS = 4
_BYTES = 4


def ring_of(rows: int, columns: int, workspace_bytes: int) -> tuple[int, int]:
    """(blocks, rows of each) whose scores fit the workspace; (0, 0) if two groups of rows do not."""
    group_scores = _ROWS * row_stride(columns)
    group_bytes = group_scores // GROUP * (GROUP + 1) * _BYTES
    fit = workspace_bytes // group_bytes
    wanted = max(_BLOCK_GROUPS, _BLOCK_SCORES // group_scores)
    block = min(wanted, max(1, fit // 2), -(-rows // _ROWS))
    slots = min(_SLOTS, fit // max(block, 1))
    return (slots, block * _ROWS) if slots > 1 else (0, 0)


def row_stride(columns: int) -> int:
    return -(-columns // SPAN) * SPAN


@torch.library.custom_op("cptools::indexer_topk_gluon", mutates_args=())
def topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    starts: Tensor | None,
    lens: Tensor,
    columns: int,
    k: int,
    workspace_bytes: int,
    sorted_by: str,
) -> tuple[Tensor, Tensor]:
    """The k <= MAX_K best of the first lens [T] <= columns keys of each row: (positions int64, scores) [T, k].

    lens end where keys do; other arguments as in `scores_into`. sorted_by: as in `topk_select`.
    The workspace must hold the scores of eight rows (see `ring_of`).
    """
    rows, device = query.shape[0], query.device
    positions = torch.empty(rows, k, dtype=torch.int64, device=device)
    chosen = torch.empty(rows, k, dtype=torch.float32, device=device)
    slots, block = ring_of(rows, columns, workspace_bytes)
    slots = min(slots, -(-rows // block))
    ring = torch.empty(slots, block, row_stride(columns), dtype=torch.float32, device=device)
    tops = torch.empty(slots, block, row_stride(columns) // GROUP, dtype=torch.float32, device=device)
    # All memory is the current stream's: the others are joined before any of it can be taken again.
    with torch.cuda.device(device):
        main = torch.cuda.current_stream()
        scorers = main, torch.cuda.Stream()
        selector = torch.cuda.Stream(priority=-1)
        score = GroupedScores(
            aligned(keys, 16), scales, heads=query.shape[1], rows=block, columns=columns, starts=starts is not None
        )
        select = GroupedSelection(block, columns, k, sorted_by, device)
        scorers[1].wait_stream(main)
        selector.wait_stream(main)
        freed: list[torch.cuda.Event] = []
        for number, start in enumerate(range(0, rows, block)):
            part = slice(start, min(start + block, rows))
            scorer = scorers[number % 2]
            scores, maxima = (buffer[number % slots, : part.stop - start] for buffer in (ring, tops))
            if number >= slots:
                scorer.wait_event(freed[number - slots])
            some = None if starts is None else starts[part]
            score(scorer, scores, maxima, query[part], weights[part], some, lens[part])
            selector.wait_event(scorer.record_event())
            select(selector, positions[part], chosen[part], scores, maxima, lens[part])
            freed.append(selector.record_event())
        main.wait_stream(scorers[1])
        main.wait_stream(selector)
    return positions, chosen


@topk.register_fake
def _(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    starts: Tensor | None,
    lens: Tensor,
    columns: int,
    k: int,
    workspace_bytes: int,
    sorted_by: str,
) -> tuple[Tensor, Tensor]:
    shape = query.shape[0], k
    return query.new_empty(shape, dtype=torch.int64), query.new_empty(shape, dtype=torch.float32)
