"""The k best cached keys of a row: gather its pages, then the reference of the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import IndexRows
from ..indexer_topk import reference as indexer
from ..kv_gather.reference import gather_sequences


def paged_topk(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    tables: Tensor,
    *,
    kv_lens: Tensor,
    k: int,
    row_format: IndexRows,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """See `cptools.kernels.paged_topk`. Only as many pages are read as the longest row sees, which is a sync."""
    requests = tables.shape[0]
    longest = int(kv_lens.max()) if kv_lens.numel() else 0
    blocks = -(-longest // page_size) if pages.shape[0] else 0
    # A table ends in -1 where a request has no page; what stands there is beyond the lengths of its rows.
    used = tables[:, :blocks].clamp(0, max(pages.shape[0] - 1, 0))
    span = used.shape[1] * page_size
    rows = gather_sequences(pages, used, [span] * requests, planes=row_format.planes, page_size=page_size)
    starts = torch.arange(requests, device=query.device).repeat_interleave(query.shape[0] // max(requests, 1)) * span
    return indexer.indexer_topk(
        row_format.round_query(query.float()),
        weights.float(),
        row_format.unpack(rows),
        key_starts=starts,
        kv_lens=kv_lens.clamp(max=span),
        k=k,
    )
