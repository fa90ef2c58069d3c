"""Indexer scores I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s]) and the k best keys of each query.

Scores are made in tiles of fixed shape, ``QUERY_TILE`` queries by ``KEY_TILE`` keys aligned to the start of the
sequence, and heads are added in order: a score's bits depend on its query and its key alone. The fused form keeps only
running candidates, so memory is O(queries * k + one tile), whatever the context. Scoring as in DeepSeek-V3.2's
lightning indexer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...integers import require_int
from ..topk_select import INVALID, decode_order, encode_order, merge_orders

QUERY_TILE = 32
KEY_TILE = 512
_TILES_A_MERGE = 16  # key tiles scored between two merges of the running candidates


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows and x.is_contiguous():
        return x
    out = x.new_zeros(rows, *x.shape[1:])
    out[: x.shape[0]] = x
    return out


class _QueryTile:
    """QUERY_TILE queries, padded, ready to be scored in float32 against any key tile."""

    def __init__(self, query: Tensor, weights: Tensor) -> None:
        _, heads, depth = query.shape
        # Head-major, so that each head's scores are one contiguous block.
        self.query = _pad_rows(query.float(), QUERY_TILE).transpose(0, 1).reshape(heads * QUERY_TILE, depth)
        self.weights = _pad_rows(weights.float(), QUERY_TILE).t().contiguous().unsqueeze(2)
        self.heads = heads

    def score(self, keys: Tensor) -> Tensor:
        """keys [<= KEY_TILE, D] -> float32 [QUERY_TILE, KEY_TILE]."""
        products = (self.query @ _pad_rows(keys.float(), KEY_TILE).t()).relu_().view(self.heads, QUERY_TILE, KEY_TILE)
        total = products[0] * self.weights[0]
        for head in range(1, self.heads):
            total.addcmul_(products[head], self.weights[head])
        return total


def _check(query: Tensor, weights: Tensor, keys: Tensor) -> None:
    if (
        query.dim() != 3
        or query.shape[1] < 1
        or weights.shape != query.shape[:2]
        or keys.dim() != 2
        or keys.shape[1] != query.shape[2]
    ):
        raise ValueError(
            f"indexer: want query [T, H, D], weights [T, H], keys [S, D], "
            f"got {tuple(query.shape)}, {tuple(weights.shape)}, {tuple(keys.shape)}"
        )


def indexer_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """All scores of one sequence: query [T, H, D], weights [T, H], keys [S, D], floats -> float32 [T, S]."""
    _check(query, weights, keys)
    rows, length = query.shape[0], keys.shape[0]
    out = query.new_empty(rows, length, dtype=torch.float32)
    for start in range(0, rows, QUERY_TILE):
        stop = min(start + QUERY_TILE, rows)
        tile = _QueryTile(query[start:stop], weights[start:stop])
        for first in range(0, length, KEY_TILE):
            block = keys[first : first + KEY_TILE]
            out[start:stop, first : first + KEY_TILE] = tile.score(block)[: stop - start, : block.shape[0]]
    return out


def _sequences(key_starts: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, key start) of each run of equal key_starts."""
    starts, counts = torch.unique_consecutive(key_starts, return_counts=True)
    row = 0
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        yield row, row + count, start
        row += count


def indexer_topk(
    query: Tensor, weights: Tensor, keys: Tensor, *, key_starts: Tensor, kv_lens: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k best keys of each query, without storing the scores.

    query [T, H, D], weights [T, H] and keys [S, D], floats, any scales already applied. Row t may see
    ``keys[key_starts[t] : key_starts[t] + kv_lens[t]]`` (integers [T]; rows of one sequence next to each other); of a
    row that sees none, key_starts may be anything.
    Returns (positions [T, k] int64 relative to key_starts, scores [T, k] float32) ordered by (score descending,
    position ascending), then -1 and -inf. Local. Raises ValueError if shapes do not fit or a row reaches beyond S.
    """
    _check(query, weights, keys)
    require_int("k", k, minimum=1)
    rows = query.shape[0]
    if key_starts.shape != (rows,) or kv_lens.shape != (rows,):
        raise ValueError(
            f"indexer_topk: key_starts {tuple(key_starts.shape)} and kv_lens {tuple(kv_lens.shape)} must be [{rows}]"
        )
    key_starts = torch.where(kv_lens > 0, key_starts, key_starts.clamp(0, keys.shape[0]))
    ends = key_starts + kv_lens.clamp(min=0)
    if rows and not 0 <= int(key_starts.min()) <= int(ends.max()) <= keys.shape[0]:
        span = f"from {int(key_starts.min())} to {int(ends.max())}"
        raise ValueError(f"indexer_topk: rows reach {span}, there are {keys.shape[0]} keys")
    chosen = torch.full((rows, k), INVALID, dtype=torch.int64, device=query.device)
    columns = torch.arange(KEY_TILE, device=query.device)
    for first, end, key_start in _sequences(key_starts):
        for start in range(first, end, QUERY_TILE):
            stop = min(start + QUERY_TILE, end)
            tile = _QueryTile(query[start:stop], weights[start:stop])
            limits = kv_lens[start:stop].unsqueeze(1)
            reach = int(limits.max())
            pending = [chosen[start:stop]]
            for position in range(0, reach, KEY_TILE):
                block = keys[key_start + position : key_start + min(position + KEY_TILE, reach)]
                positions = columns + position
                order = encode_order(tile.score(block)[: stop - start], positions)
                pending.append(order.masked_fill_(positions >= limits, INVALID))
                if len(pending) > _TILES_A_MERGE:
                    pending = [merge_orders(torch.cat(pending, 1), k)]
            chosen[start:stop] = merge_orders(torch.cat(pending, 1), k)
    scores, positions = decode_order(chosen)
    return positions, scores
