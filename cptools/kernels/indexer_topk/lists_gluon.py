"""Fused selection over many keys for many rows: a list of candidates a row, and scores that never leave a chunk.

The first keys are scored whole and selected from. After that each chunk of scores offers a row only what beats its
threshold, the worst score of a list of k or more; a list that has grown long is cut and its threshold rises. At n keys
seen, a chunk of c more brings about k c / n candidates: nearly all of it is read once and forgotten. A list has room
for a whole chunk, so no distribution of scores overflows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..topk_select import merge_orders, topk_select
from . import keep_triton as lists_of
from .gluon import score_contiguous

ROW_BYTES = 8 * lists_of.CAPACITY + 4 * lists_of.CHUNK
"""Workspace of one row."""
WHOLE = 2 * lists_of.CAPACITY
"""Keys that are scored whole, in the place of a list."""


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
    in_order: bool,
) -> tuple[Tensor, Tensor]:
    """The k <= MAX_K best of the first lens [T] <= columns keys of each row: (positions int64, scores) [T, k].

    lens end where keys do; other arguments as in `scores_into`. in_order: else valid entries stand in any order.
    """
    rows, device = query.shape[0], query.device
    block = max(1, min(rows, workspace_bytes // ROW_BYTES))
    chosen = torch.empty(rows, k, dtype=torch.int64, device=device)
    lists = torch.empty(block, lists_of.CAPACITY, dtype=torch.int64, device=device)
    chunk = torch.empty(block, lists_of.CHUNK, dtype=torch.float32, device=device)
    counts = torch.empty(block, dtype=torch.int32, device=device)
    thresholds = torch.empty(block, dtype=torch.float32, device=device)
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        some = slice(0, part.stop - start)
        problem = query[part], weights[part], keys, scales, None if starts is None else starts[part], lens[part]
        state = lists[some], counts[some], thresholds[some]
        whole = lists.view(torch.float32)[some, : min(columns, WHOLE)]
        score_contiguous(whole, *problem, 0)
        selected = topk_select(whole, k, lengths=lens[part], sorted_by="none", positions_dtype=torch.int32)
        lists_of.start(*state, *selected)
        del selected
        for first in range(WHOLE, columns, lists_of.CHUNK):
            scores = chunk[some, : min(lists_of.CHUNK, columns - first)]
            score_contiguous(scores, *problem, first)
            lists_of.take(*state, scores, lens[part], first)
            if first + lists_of.CHUNK < columns:
                lists_of.keep(*state, k, lists_of.ROOMY)
        lists_of.best(lists[some], counts[some], chosen[part])
    del lists, chunk
    return lists_of.decode(merge_orders(chosen, k) if in_order else chosen)


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
    in_order: bool,
) -> tuple[Tensor, Tensor]:
    shape = query.shape[0], k
    return query.new_empty(shape, dtype=torch.int64), query.new_empty(shape, dtype=torch.float32)
