"""The k best cached keys of decode rows, straight from the index pages of their requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import FP8, SCALE_BLOCK, IndexRows
from ..arguments import (
    ANY,
    FLOATS,
    check_count,
    check_integers,
    check_one_device,
    check_tensor,
    dense,
    dense_rows,
    holds_words,
)
from ..impl import Choice, choose, triton_obstacle
from ..index_query import fp8_query
from ..indexer_topk import WORKSPACE_BYTES, IndexKeys, choose_indexer_scores, indexer_topk_fp8
from ..indexer_topk.chunks import by_position, topk_of_chunks
from ..indexer_topk.keys import pages_obstacle
from . import reference

__all__ = ["choose_paged_topk", "paged_topk"]

_TRITON_DIM = 256
_QUERIES = (*FLOATS, FP8)


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
    workspace_bytes: int = WORKSPACE_BYTES,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The k best keys of each row -> (positions [T, k] int64 ascending, then -1; scores [T, k] float32, then -inf).

    query [T, H, D] and weights [T, H], floats, any scales applied; FP8 rows of one scale quantise the query, or take it
    from `fp8_query`. pages uint8 [P, page_size * row_bytes]. tables [R, blocks], R a divisor of T: row t reads table
    ``t // (T // R)``. Row t sees the first ``kv_lens[t]`` keys of it ([T]; int32 or int64, as tables), none if 0; what
    pages hold beyond never matters, nor do the entries of a table there. Before, a page id that no page has reads as
    keys of zeros. The set is that of `indexer_topk`: score descending, position ascending.

    Local, on the current stream; the kernels make no host sync and may be captured in a CUDA graph. They use at most
    ``workspace_bytes`` beside the results. impl: "auto" | "reference" | "triton" | "gluon"; `choose_paged_topk` says
    what would run.
    """
    check_inputs(query, weights, pages, tables, kv_lens, k, row_format, page_size)
    rows, requests = query.shape[0], tables.shape[0]
    choice, keys = _choose(query, pages, tables, row_format, page_size, impl)
    chosen = choice.impl
    if chosen == "reference":
        sizes = {"row_format": row_format, "page_size": page_size}
        return by_position(*reference.paged_topk(query, weights, pages, tables, kv_lens=kv_lens, k=k, **sizes))  # type: ignore[arg-type]
    if keys is not None:
        values, scaled = (query, weights) if query.dtype == FP8 else fp8_query(query, weights)
        return indexer_topk_fp8(
            values,
            scaled,
            keys,
            kv_lens=kv_lens,
            k=k,
            sorted_by="position",
            workspace_bytes=workspace_bytes,
            impl=chosen,
        )
    from ..indexer_topk.triton import scores_into

    query, weights, keys_of_pages = query.contiguous(), weights.float().contiguous(), pages.view(row_format.dtype)
    tables, kv_lens = dense_rows(tables), dense(kv_lens)
    together = rows // max(requests, 1)

    def score(out: Tensor, part: slice, first: int) -> None:
        some = tables[part.start // together : part.stop // together]
        scores_into(out, query[part], weights[part], keys_of_pages, None, some, None, kv_lens[part], first, page_size)

    return topk_of_chunks(
        score,
        kv_lens,
        columns=tables.shape[1] * page_size,
        k=k,
        workspace_bytes=workspace_bytes,
        together=max(together, 1),
        sorted_by="position",
    )


def check_inputs(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    tables: Tensor,
    kv_lens: Tensor,
    k: int,
    row_format: IndexRows,
    page_size: int,
) -> None:
    """ValueError unless these are arguments of `paged_topk`."""
    check_count("paged_topk", "k", k, minimum=1)
    check_count("paged_topk", "page_size", page_size, minimum=1)
    if (
        query.dim() != 3
        or query.shape[1] < 1
        or query.shape[2] != row_format.dim
        or query.dtype not in _QUERIES
        or weights.shape != query.shape[:2]
        or not weights.is_floating_point()
    ):
        raise ValueError(
            f"paged_topk: want float query [T, H, {row_format.dim}] and weights [T, H], "
            f"got {query.dtype} {tuple(query.shape)} and {weights.dtype} {tuple(weights.shape)}"
        )
    check_tensor("paged_topk", "pages", pages, (torch.uint8,), (ANY, page_size * row_format.row_bytes))
    rows = query.shape[0]
    check_integers("paged_topk", "tables", tables, (ANY, ANY))
    check_integers("paged_topk", "kv_lens", kv_lens, (rows,))
    requests = tables.shape[0]
    if rows % max(requests, 1) or (rows and not requests):
        raise ValueError(f"paged_topk: {rows} rows need tables that share them evenly, got {tuple(tables.shape)}")
    check_one_device("paged_topk", query=query, weights=weights, pages=pages, tables=tables, kv_lens=kv_lens)


def choose_paged_topk(
    query: Tensor, pages: Tensor, tables: Tensor, *, row_format: IndexRows, page_size: int, impl: str = "auto"
) -> Choice:
    """What `paged_topk` would run for these inputs, and why nothing faster."""
    return _choose(query, pages, tables, row_format, page_size, impl)[0]


def _choose(
    query: Tensor, pages: Tensor, tables: Tensor, row_format: IndexRows, page_size: int, impl: str
) -> tuple[Choice, IndexKeys | None]:
    """The choice, and FP8 keys where kernels can read them."""
    obstacle = triton_obstacle(query.device)
    gluon: str | None = f"keys are {row_format.dtype}, not FP8 of one scale"
    if row_format.dtype == FP8 and row_format.dim <= SCALE_BLOCK:
        gluon = obstacle = obstacle or pages_obstacle(pages, page_size=page_size)
        if obstacle is None:
            keys = IndexKeys.from_pages(pages, tables, page_size=page_size)
            return choose_indexer_scores(query, keys, impl=impl), keys
    elif obstacle is None:
        if row_format.dim > (SCALE_BLOCK if row_format.dtype == FP8 else _TRITON_DIM):
            obstacle = f"keys of dim={row_format.dim} {row_format.dtype}"
        elif not holds_words(pages, row_format.dtype.itemsize):
            obstacle = f"pages are not at multiples of {row_format.dtype.itemsize} bytes, strides {pages.stride()}"
    return choose("paged_topk", impl, {"gluon": gluon, "triton": obstacle}), None
