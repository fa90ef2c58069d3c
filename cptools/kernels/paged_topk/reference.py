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
    used = tables[:, : -(-max(longest, 0) // page_size)].long()
    span = used.shape[1] * page_size
    # Keys of a page that does not exist are zeros; behind these, a table usually ends in -1 beyond the lengths.
    exists = (used >= 0) & (used < pages.shape[0])
    some = pages if pages.shape[0] else pages.new_zeros(1, pages.shape[1])
    found = torch.where(exists, used, 0)
    rows = gather_sequences(some, found, [span] * requests, planes=row_format.planes, page_size=page_size)
    keys = row_format.unpack(rows)
    if not bool(exists.all()):
        keys.masked_fill_(~exists.flatten().repeat_interleave(page_size).unsqueeze(1), 0.0)
    starts = torch.arange(requests, device=query.device).repeat_interleave(query.shape[0] // max(requests, 1)) * span
    return indexer.indexer_topk(
        row_format.round_query(query.float()),
        weights.float(),
        keys,
        key_starts=starts,
        kv_lens=kv_lens.clamp(max=span),
        k=k,
    )
