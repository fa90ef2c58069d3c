"""Top-k without the [queries x keys] matrix, exact, in a bounded workspace.

The scores of as many rows as the workspace holds, and the selection of `topk_select`; of a row that does not fit, chunk
after chunk with the candidates carried along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..topk_select import topk_select

_ALIGN = 64  # a multiple of the scoring kernels' tiles

Order = Literal["score", "position", "none"]

Score = Callable[[Tensor, slice, int], None]
"""(out [rows, columns], rows, first): scores of these rows at positions first + column."""


def chunk_shape(rows: int, columns: int, k: int, workspace_bytes: int, together: int = 1) -> tuple[int, int]:
    """(rows, keys) of one chunk: whole rows where they fit, else as few rows as may be and at least k keys of them.

    Rows are a multiple of ``together``, of which ``rows`` is one.
    """
    whole = workspace_bytes // (4 * (_round_up(columns) + k)) // together * together
    if whole:
        block = -(-rows // -(-rows // whole))  # blocks of one size, by fours as the kernels take rows
        block = -(-block // together) * together
        fours = -(-block // (4 * together)) * 4 * together
        return min(rows, fours if fours <= whole else block), _round_up(columns)
    return together, max((workspace_bytes // (4 * together) - k) // _ALIGN * _ALIGN, _round_up(k))


def _round_up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def topk_of_chunks(
    score: Score,
    lens: Tensor,
    *,
    columns: int,
    k: int,
    workspace_bytes: int,
    together: int = 1,
    sorted_by: Order = "score",
) -> tuple[Tensor, Tensor]:
    """The k best of each row's first ``lens[t]`` positions, at most ``columns``: (positions int64, scores) [T, k].

    together: rows that must be scored together, such as those of one request. sorted_by: as in `topk_select`. Local, on
    the current stream, no host sync.
    """
    rows = lens.shape[0]
    block, width = chunk_shape(max(rows, together), columns, k, workspace_bytes, together)
    carried = k if width < columns else 0
    workspace = torch.empty(block, carried + width, dtype=torch.float32, device=lens.device)
    parts = []
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        space = workspace[: part.stop - start]
        parts.append(
            _carry_chunks(score, part, lens[part], space, columns, k)
            if carried
            else _whole(score, part, lens[part], space[:, :columns], k, sorted_by)
        )
    positions, scores = _joined(parts, k, lens)
    return by_position(positions, scores) if carried and sorted_by == "position" else (positions, scores)


def by_position(positions: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same entries [T, k], positions ascending and -1 last."""
    order = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions).argsort(dim=1, stable=True)
    return positions.gather(1, order), scores.gather(1, order)


def _joined(parts: list[tuple[Tensor, Tensor]], k: int, lens: Tensor) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = torch.empty(0, k, dtype=torch.float32, device=lens.device)
        return empty.long(), empty
    return torch.cat([positions for positions, _ in parts]), torch.cat([scores for _, scores in parts])


def _whole(score: Score, part: slice, lens: Tensor, space: Tensor, k: int, order: Order) -> tuple[Tensor, Tensor]:
    score(space, part, 0)
    return topk_select(space, k, lengths=lens, sorted_by=order)


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
