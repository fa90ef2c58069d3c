"""Causal attention with per-head keys and values, in tiles with a running softmax: no [T, S] matrix is ever held."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import ANY, FLOATS_AND_DOUBLE, check_integers, check_one_device, check_tensor

QUERY_TILE = 64
KEY_TILE = 256


def dense_mha(query: Tensor, keys: Tensor, values: Tensor, kv_lens: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """query [T, H, D], keys [S, H, D], values [S, H, V] of one sequence -> (out [T, H, V], lse [T, H]) float32.

    Row t sees the first ``kv_lens[t]`` keys (integers [T], at most S); none, or fewer, gives out 0, lse -inf. Local.

    Raises ValueError where shapes, dtypes or devices do not fit, and on a length beyond the keys.
    """
    op = "dense_mha"
    check_tensor(op, "query", query, FLOATS_AND_DOUBLE, (ANY, ANY, ANY))
    tokens, heads, _ = query.shape
    check_tensor(op, "keys", keys, FLOATS_AND_DOUBLE, (ANY, *query.shape[1:]))
    check_tensor(op, "values", values, FLOATS_AND_DOUBLE, (*keys.shape[:2], ANY))
    check_integers(op, "kv_lens", kv_lens, (tokens,))
    check_one_device(op, query=query, keys=keys, values=values, kv_lens=kv_lens)
    if tokens and int(kv_lens.max()) > keys.shape[0]:
        raise ValueError(f"{op}: kv_lens reach {int(kv_lens.max())}, there are {keys.shape[0]} keys")
    by_head = query.float().transpose(0, 1)  # [H, T, D]
    keys_t, values_t = keys.float().permute(1, 2, 0), values.float().transpose(0, 1)  # [H, D, S], [H, S, V]
    out = torch.zeros(tokens, heads, values.shape[2], dtype=torch.float32, device=query.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=query.device)
    for start in range(0, tokens, QUERY_TILE):
        stop = min(start + QUERY_TILE, tokens)
        limits = kv_lens[start:stop].view(1, -1, 1)
        top = torch.full((heads, stop - start, 1), -torch.inf, device=query.device)
        total = torch.zeros_like(top)
        acc = torch.zeros(heads, stop - start, values.shape[2], device=query.device)
        for first in range(0, int(limits.max()), KEY_TILE):
            block = slice(first, min(first + KEY_TILE, keys.shape[0]))
            scores = torch.bmm(by_head[:, start:stop], keys_t[:, :, block]) * scale
            positions = torch.arange(block.start, block.stop, device=query.device)
            scores.masked_fill_(positions >= limits, -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            base = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights, decay = torch.exp(scores - base), torch.exp(top - base)
            total = total * decay + weights.sum(-1, keepdim=True)
            acc = acc * decay + _weighted_values(weights, values_t[:, block], positions < limits)
            top = new_top
        out[start:stop] = (acc / total.masked_fill(total == 0, 1.0)).transpose(0, 1)
        lse[start:stop] = (top + torch.log(total)).squeeze(-1).t()
    return out, lse


def _weighted_values(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights [H, T, S] times values [H, S, V], where a value that a row may not see never matters (0 * NaN is NaN)."""
    broken = ~torch.isfinite(values).all(-1).all(0)
    total = torch.bmm(weights, values.masked_fill(broken.unsqueeze(1), 0.0))
    for key in broken.nonzero().flatten().tolist():
        term = weights[:, :, key, None] * values[:, None, key]
        total += torch.where(visible[:, :, key, None], term, 0.0)
    return total
