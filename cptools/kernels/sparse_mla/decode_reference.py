"""Decode attention over packed cache rows: unpack, then the reference of sparse MLA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import MlaRows
from .reference import QUERY_TILE, sparse_mla


def sparse_mla_decode_reference(
    query: Tensor, rows: Tensor, slots: Tensor, counts: Tensor | None, *, row_format: MlaRows, scale: float
) -> tuple[Tensor, Tensor]:
    """query [T, H, D], rows uint8 [S, row_bytes], slots [T, K], counts [T] or None -> (out, lse) float32. Local.

    Only selected rows are unpacked, a tile of queries at a time: memory does not grow with the pool.
    """
    tokens, columns = slots.shape
    column = torch.arange(columns, device=slots.device)
    outs, lses = [], []
    for start in range(0, tokens, QUERY_TILE):
        tile = slots[start : start + QUERY_TILE].long()
        used = (tile >= 0) & (tile < rows.shape[0])
        if counts is not None:
            used &= column < counts[start : start + QUERY_TILE, None]
        keys = row_format.unpack_joint(rows[tile[used]])
        ids = torch.full_like(tile, -1)
        ids[used] = torch.arange(keys.shape[0], device=slots.device)
        out, lse = sparse_mla(query[start : start + QUERY_TILE], keys, ids, scale=scale, v_dim=row_format.latent)
        outs.append(out)
        lses.append(lse)
    if not outs:
        shape = (0, query.shape[1], row_format.latent)
        return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape[:2], dtype=torch.float32)
    return torch.cat(outs), torch.cat(lses)
