"""FP8 scores and selection in terms of float32 ones: values times scales first, which powers of two make exact."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .keys import IndexKeys


def _float_problem(keys: IndexKeys, rows: int, key_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 keys [S, D], and for each row the first key of its sequence, int64 [T]."""
    values, first = keys.dequantized()
    if first is not None:
        starts = first.repeat_interleave(rows // max(first.shape[0], 1))
    elif key_starts is not None:
        starts = key_starts.long()
    else:
        starts = torch.zeros(rows, dtype=torch.int64, device=values.device)
    return values, starts


def indexer_scores_fp8(
    query: Tensor, weights: Tensor, keys: IndexKeys, *, kv_lens: Tensor, key_starts: Tensor | None, columns: int
) -> Tensor:
    values, starts = _float_problem(keys, query.shape[0], key_starts)
    everything = reference.indexer_scores(query.float(), weights, values)
    column = torch.arange(columns, device=query.device)
    position = starts.unsqueeze(1) + column
    seen = (column < kv_lens.unsqueeze(1)) & (starts >= 0).unsqueeze(1) & (position < values.shape[0])
    seen &= column < keys.capacity  # beyond a table stand the keys of the next request
    if not values.shape[0]:
        return torch.full((query.shape[0], columns), -torch.inf, device=query.device)
    scores = everything.gather(1, position.clamp(0, values.shape[0] - 1))
    return torch.where(seen, scores, -torch.inf)


def indexer_topk_fp8(
    query: Tensor, weights: Tensor, keys: IndexKeys, *, kv_lens: Tensor, key_starts: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    values, starts = _float_problem(keys, query.shape[0], key_starts)
    lens = torch.minimum(kv_lens.long(), values.shape[0] - starts).masked_fill(starts < 0, 0)
    if keys.block_tables is not None:
        lens = lens.clamp(max=keys.capacity)
    return reference.indexer_topk(query.float(), weights, values, key_starts=starts, kv_lens=lens, k=k)
