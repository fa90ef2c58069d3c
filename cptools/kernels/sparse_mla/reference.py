"""Multi-query attention of absorbed MLA queries over the rows an indexer selected.

Each query gathers exactly K rows (unused columns masked) and sums over K columns, in tiles of ``QUERY_TILE`` queries:
the bits of a query's result depend on its own rows alone. Semantics as FlashMLA's sparse prefill, except that an empty
selection gives lse -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rowwise import WIDTH_MULTIPLE, pad_widths

QUERY_TILE = 16


def sparse_mla(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, v_dim: int) -> tuple[Tensor, Tensor]:
    """query [T, H, D], rows [S, D], ids [T, K] -> (out [T, H, v_dim] float32, lse [T, H] float32, natural log).

    Values are the first ``v_dim`` columns of a row. An id outside [0, S) is ignored wherever it stands, and what other
    rows hold never matters (NaN included). A query without any row gives out 0, lse -inf. ``scale`` multiplies the
    scores; for MLA it is qk_head_dim ** -0.5, never (latent + rope) ** -0.5. Local.
    """
    if query.dim() != 3 or rows.dim() != 2 or query.shape[2] != rows.shape[1] or not 0 < v_dim <= rows.shape[1]:
        raise ValueError(
            f"sparse_mla: want query [T, H, D], rows [S, D] and v_dim <= D, "
            f"got {tuple(query.shape)}, {tuple(rows.shape)}, v_dim={v_dim}"
        )
    if ids.dim() != 2 or ids.shape[0] != query.shape[0] or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"sparse_mla: ids must be int64 or int32 [{query.shape[0]}, K], got {ids.dtype} {tuple(ids.shape)}"
        )
    tokens, heads, _ = query.shape
    out = torch.zeros(tokens, heads, v_dim, dtype=torch.float32, device=query.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=query.device)
    if rows.shape[0] == 0 or ids.shape[1] == 0:
        return out, lse
    query, rows = pad_widths(query.float(), 2), pad_widths(rows.float(), 1)
    columns, values = (-(-size // WIDTH_MULTIPLE) * WIDTH_MULTIPLE for size in (ids.shape[1], v_dim))
    for start in range(0, tokens, QUERY_TILE):
        stop = min(start + QUERY_TILE, tokens)
        count = stop - start
        padded = query.new_zeros(QUERY_TILE, heads, query.shape[2])
        padded[:count] = query[start:stop]
        tile_ids = ids.new_full((QUERY_TILE, columns), -1, dtype=torch.int64)
        tile_ids[:count, : ids.shape[1]] = ids[start:stop]
        unused = (tile_ids < 0) | (tile_ids >= rows.shape[0])
        keys = rows[tile_ids.masked_fill(unused, 0)]
        if bool(unused.any()):
            keys.masked_fill_(unused.unsqueeze(2), 0.0)  # a weight of 0 does not cancel a NaN
        scores = torch.bmm(padded, keys.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(unused.unsqueeze(1), -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        value = torch.bmm(weights, keys[..., :values])[..., :v_dim]
        empty = total == 0
        out[start:stop] = (value / total.masked_fill(empty, 1.0))[:count]
        lse[start:stop] = (top + torch.log(total)).squeeze(-1)[:count]
    return out, lse
