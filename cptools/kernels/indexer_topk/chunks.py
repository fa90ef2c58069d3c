"""Top-k without the [queries x keys] matrix, exact, in a bounded workspace.

Few rows: the scores of as many rows as the workspace holds, and the selection of `topk_select`; of a row that does not
fit, chunk after chunk with the candidates carried along. Many rows: a list of candidates for each row, which takes only
scores above a threshold that rises whenever the list is cut; then hardly a score is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..topk_select import merge_orders, topk_select

_ALIGN = 64  # a multiple of the scoring kernels' tiles

Score = Callable[[Tensor, slice, int], None]
"""(out [rows, columns], rows, first): scores of these rows at positions first + column."""
Collect = Callable[[Tensor, Tensor, Tensor, slice, int, int], None]
"""(lists, counts, thresholds, rows, first, columns): keys of positions [first, first + columns) into the lists."""


def chunk_shape(rows: int, columns: int, k: int, workspace_bytes: int) -> tuple[int, int]:
    """(rows, keys) of one chunk: whole rows where they fit, else one row and at least k keys of it."""
    whole = workspace_bytes // (4 * (_round_up(columns) + k))
    if whole:
        return min(rows, whole), _round_up(columns)
    return 1, max((workspace_bytes // 4 - k) // _ALIGN * _ALIGN, _round_up(k))


def _round_up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def topk_of_chunks(score: Score, lens: Tensor, *, columns: int, k: int, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """The k best of each row's first ``lens[t]`` positions, at most ``columns``: (positions int64, scores) [T, k].

    Local, on the current stream, no host sync.
    """
    rows = lens.shape[0]
    block, width = chunk_shape(max(rows, 1), columns, k, workspace_bytes)
    carried = k if width < columns else 0
    workspace = torch.empty(block, carried + width, dtype=torch.float32, device=lens.device)
    parts = []
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        space = workspace[: part.stop - start]
        parts.append(
            _carry_chunks(score, part, lens[part], space, columns, k)
            if carried
            else _whole(score, part, lens[part], space, columns, k)
        )
    return _joined(parts, k, lens)


def _joined(parts: list[tuple[Tensor, Tensor]], k: int, lens: Tensor) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = torch.empty(0, k, dtype=torch.float32, device=lens.device)
        return empty.long(), empty
    return torch.cat([positions for positions, _ in parts]), torch.cat([scores for _, scores in parts])


def _whole(score: Score, part: slice, lens: Tensor, space: Tensor, columns: int, k: int) -> tuple[Tensor, Tensor]:
    chunk = space[:, :columns]
    score(chunk, part, 0)
    return topk_select(chunk, k, lengths=lens)


def _carry_chunks(
    score: Score, part: slice, lens: Tensor, space: Tensor, columns: int, k: int
) -> tuple[Tensor, Tensor]:
    """A row of the workspace is [candidates | one chunk]. Candidates stand in order and before all later positions, so
    that the selection's own tie rule, lower column first, is lower position first."""
    from .triton import carry_into

    width = space.shape[1] - k
    chunk = space[:, k:]
    score(chunk, part, 0)
    positions, scores = topk_select(chunk, k, lengths=lens)
    space[:, :k] = scores
    for first in range(width, columns, width):
        chunk = space[:, k : k + min(width, columns - first)]
        score(chunk, part, first)
        seen = (lens.clamp(max=columns) - first).clamp(0, chunk.shape[1])
        chosen, scores = topk_select(space[:, : k + chunk.shape[1]], k, lengths=k + seen)
        carried = torch.empty_like(positions)
        carry_into(carried, space, chosen, scores, positions, first)
        positions = carried
    return positions, scores


def topk_of_lists(
    collect: Collect, lens: Tensor, *, columns: int, k: int, workspace_bytes: int, in_order: bool
) -> tuple[Tensor, Tensor]:
    """As `topk_of_chunks`, for k <= MAX_K of `keep_triton`; in_order: else the k best stand in any order."""
    from . import keep_triton as lists_of

    rows, device = lens.shape[0], lens.device
    block = max(1, min(rows, workspace_bytes // (8 * lists_of.LARGE)))
    lists = torch.empty(block, lists_of.LARGE, dtype=torch.int64, device=device)
    counts = torch.empty(block, dtype=torch.int32, device=device)
    thresholds = torch.empty(block, dtype=torch.float32, device=device)
    chunk = lists_of.LARGE - lists_of.ROOMY  # what any list still takes, should all scores be good
    parts = []
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        some = slice(0, part.stop - start)
        state = lists[some], counts[some], thresholds[some]
        counts[some] = lens[part].clamp(0, min(columns, lists_of.LARGE))
        thresholds.fill_(torch.nan)  # takes everything
        collect(*state, part, 0, min(columns, lists_of.LARGE))
        for first in range(lists_of.LARGE, columns, chunk):
            lists_of.keep(*state, k, lists_of.ROOMY)
            collect(*state, part, first, min(chunk, columns - first))
        keys = lists_of.best(lists[some], counts[some], k)
        parts.append(lists_of.decode(merge_orders(keys, k) if in_order else keys))
    return _joined(parts, k, lens)
