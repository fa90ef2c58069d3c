"""The k best cached keys of decode rows, straight from the index pages of their requests."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import FP8, SCALE_BLOCK, IndexRows
from ..impl import Choice, choose, triton_obstacle
from ..index_query import fp8_query
from ..indexer_topk import WORKSPACE_BYTES, IndexKeys, choose_indexer_scores, indexer_topk_fp8
from ..indexer_topk.chunks import by_position, topk_of_chunks
from . import reference

__all__ = ["choose_paged_topk", "paged_topk"]

_TRITON_DIM = 256


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
    from `fp8_query`. pages uint8 [P,
    page_size * row_bytes]. tables [R, blocks] integers, R a divisor of T: row t reads table ``t // (T // R)``. Row t
    sees the first ``kv_lens[t]`` keys of it (integers [T]), none if 0; what pages hold beyond never matters, nor do
    the entries of a table there. The set is that of `indexer_topk`: score descending, position ascending.

    Local, on the current stream; the kernels make no host sync and may be captured in a CUDA graph. They use at most
    ``workspace_bytes`` beside the results. impl: "auto" | "reference" | "triton" | "gluon"; `choose_paged_topk` says
    what would run.
    """
    rows, requests = query.shape[0], tables.shape[0]
    if query.dim() != 3 or query.shape[2] != row_format.dim or weights.shape != query.shape[:2]:
        raise ValueError(
            f"paged_topk: want query [T, H, {row_format.dim}] and weights [T, H], "
            f"got {tuple(query.shape)} and {tuple(weights.shape)}"
        )
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != page_size * row_format.row_bytes:
        raise ValueError(
            f"paged_topk: pages must be uint8 [P, {page_size * row_format.row_bytes}], "
            f"got {pages.dtype} {tuple(pages.shape)}"
        )
    if kv_lens.shape != (rows,) or tables.dim() != 2 or rows % max(requests, 1) or (rows and not requests):
        raise ValueError(
            f"paged_topk: {rows} rows need kv_lens [{rows}] and tables that share them evenly, "
            f"got {tuple(kv_lens.shape)} and {tuple(tables.shape)}"
        )
    chosen = choose_paged_topk(query, pages, tables, row_format=row_format, page_size=page_size, impl=impl).impl
    if chosen == "reference":
        sizes = {"row_format": row_format, "page_size": page_size}
        return by_position(*reference.paged_topk(query, weights, pages, tables, kv_lens=kv_lens, k=k, **sizes))  # type: ignore[arg-type]
    if row_format.dtype == FP8:
        values, scaled = (query, weights) if query.dtype == FP8 else fp8_query(query, weights)
        keys = IndexKeys.from_pages(pages, tables, page_size=page_size)
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


def choose_paged_topk(
    query: Tensor, pages: Tensor, tables: Tensor, *, row_format: IndexRows, page_size: int, impl: str = "auto"
) -> Choice:
    """What `paged_topk` would run for these inputs, and why nothing faster."""
    device = triton_obstacle(query.device)
    if row_format.dtype == FP8 and device is None and row_format.dim <= SCALE_BLOCK:
        keys = IndexKeys.from_pages(pages, tables, page_size=page_size)
        return choose_indexer_scores(query, keys, impl=impl)
    obstacle = device
    if obstacle is None and row_format.dim > (SCALE_BLOCK if row_format.dtype == FP8 else _TRITON_DIM):
        obstacle = f"keys of dim={row_format.dim} {row_format.dtype}"
    gluon = f"keys are {row_format.dtype}, not FP8 of one scale"
    return choose("paged_topk", impl, {"gluon": device or gluon, "triton": obstacle})
