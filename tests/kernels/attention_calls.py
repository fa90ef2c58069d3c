"""Small valid calls of the selection and attention ops, argument by argument, so that one of them can be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8, IndexRows
from cptools.kernels.indexer_topk import (
    IndexKeys,
    choose_indexer_scores,
    indexer_scores,
    indexer_scores_fp8,
    indexer_topk,
    indexer_topk_fp8,
)
from cptools.kernels.paged_topk import choose_paged_topk, paged_topk
from cptools.kernels.shard_candidates import choose_shard_candidates, chosen_positions, encode_candidates
from cptools.kernels.sparse_mla import choose_sparse_mla, choose_sparse_mla_decode, sparse_mla, sparse_mla_decode
from cptools.kernels.topk_select import INVALID, decode_order, encode_order, merge_orders, topk_select
from cptools.layout import KVLayout

FP8_ROWS, FLOAT_ROWS = IndexRows(32, FP8), IndexRows(32, torch.float32)
PAGE = 4


@dataclass(frozen=True)
class Call:
    """An op with valid arguments: run(**arguments, **sizes) gives its results.

    by_row: arguments that have one entry a row of the results, of which there are several. choose: with all arguments,
    what runs; None where Triton's interpreter can not run what a GPU would.
    """

    run: Callable[..., object]
    arguments: dict[str, Tensor]
    sizes: dict[str, int]
    by_row: tuple[str, ...] = ()
    choose: Callable[..., str] | None = None


def calls() -> dict[str, Call]:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    ids = lambda high, *shape: torch.randint(0, high, shape, generator=generator)
    query, weights, keys = normal(4, 3, 32), normal(4, 3), normal(20, 32)
    spans = {"key_starts": torch.tensor([0, 0, 8, 8]), "kv_lens": torch.tensor([3, 8, 0, 12])}
    lens = torch.tensor([5, 6, 0, 8])
    tables = torch.tensor([[3, 1, -1], [0, 4, 2]])
    packed = FP8_ROWS.pack(keys)
    plane = {"values": packed[:, :32].clone().view(FP8), "scales": packed[:, 32:].clone().view(torch.float32)[:, 0]}
    paged = {"values": plane["values"].view(5, PAGE * 32), "scales": plane["scales"].view(5, PAGE)}
    fp8 = {"query": query.to(FP8), "weights": weights}
    pages = torch.cat([x.contiguous().view(torch.uint8).view(5, -1) for x in paged.values()], 1)
    float_pages = keys.view(torch.uint8).view(5, -1)
    scores, positions = normal(3, 6), torch.tensor([[4, -1, 0, 2, 3, 1], [0, 1, 2, 3, 4, 5], [-1, -1, 2, 9, 8, 7]])
    orders = encode_order(scores, positions.clamp(min=0)).masked_fill(positions < 0, INVALID)
    layout, mla = KVLayout(2, 1, 4), {"query": normal(4, 3, 24), "rows": normal(20, 24)}
    pool = BF16_MLA.pack(normal(12, 512), normal(12, 64))
    wide = {"query": normal(2, 3, 576).bfloat16(), "pool": pool, "slots": ids(13, 2, 20)}
    scale = {"scale": 0.1}

    def scored(query, weights, values, scales, tables=None, **others):
        return indexer_scores_fp8(query, weights, IndexKeys(values, scales, tables), **others)

    def selected(query, weights, values, scales, tables=None, **others):
        return indexer_topk_fp8(query, weights, IndexKeys(values, scales, tables), **others)

    def fp8_choice(query, values, scales, tables=None, **_):
        return choose_indexer_scores(query, IndexKeys(values, scales, tables)).impl

    def paged_by(row_format):
        run = lambda query, weights, pages, tables, **others: paged_topk(
            query, weights, pages, tables, row_format=row_format, **others
        )
        choose = lambda query, pages, tables, page_size, **_: choose_paged_topk(
            query, pages, tables, row_format=row_format, page_size=page_size
        )
        return run, lambda **arguments: choose(**arguments).impl

    def float_choice(query, keys, **_):
        return choose_indexer_scores(query, keys).impl

    rows = ("query", "weights", "kv_lens")
    paged_sizes = {"k": 5, "page_size": PAGE}
    floats = {"query": query, "weights": weights, "keys": keys}
    of_pages = {"query": query, "weights": weights, "tables": tables, "kv_lens": lens}
    return {
        "sparse_mla": Call(
            lambda query, rows, ids, counts, v_dim: sparse_mla(query, rows, ids, v_dim=v_dim, counts=counts, **scale),
            {**mla, "ids": ids(22, 4, 20), "counts": torch.tensor([20, 0, 7, 25])},
            {"v_dim": 16},
            ("query", "ids", "counts"),
            lambda query, rows, ids, v_dim, **_: choose_sparse_mla(query, rows, ids, v_dim=v_dim, **scale).impl,
        ),
        "sparse_mla_decode": Call(
            lambda counts, **given: sparse_mla_decode(**given, row_format=BF16_MLA, counts=counts, **scale),
            {**wide, "counts": torch.tensor([20, 7])},
            {},
            ("query", "slots", "counts"),
            lambda counts, **given: choose_sparse_mla_decode(**given, row_format=BF16_MLA).impl,
        ),
        "indexer_scores": Call(indexer_scores, floats, {}, ("query", "weights"), float_choice),
        "indexer_topk": Call(indexer_topk, floats | spans, {"k": 5}, (*rows, "key_starts"), float_choice),
        "indexer_scores_fp8": Call(scored, fp8 | plane | spans, {"columns": 10}, (*rows, "key_starts"), fp8_choice),
        "indexer_scores_fp8, paged": Call(
            scored, fp8 | paged | {"tables": tables, "kv_lens": lens}, {"columns": 10}, rows, fp8_choice
        ),
        "indexer_topk_fp8": Call(selected, fp8 | plane | spans, {"k": 5}, (*rows, "key_starts"), fp8_choice),
        "indexer_topk_fp8, paged": Call(
            selected, fp8 | paged | {"tables": tables, "kv_lens": lens}, {"k": 5}, rows, fp8_choice
        ),
        "paged_topk": Call(
            paged_by(FP8_ROWS)[0], of_pages | {"pages": pages}, paged_sizes, rows, paged_by(FP8_ROWS)[1]
        ),
        "paged_topk, floats": Call(
            paged_by(FLOAT_ROWS)[0], of_pages | {"pages": float_pages}, paged_sizes, rows, paged_by(FLOAT_ROWS)[1]
        ),
        "topk_select": Call(
            topk_select, {"scores": scores, "lengths": torch.tensor([6, 0, 3])}, {"k": 2}, ("lengths",)
        ),
        "merge_orders": Call(merge_orders, {"keys": orders}, {"k": 4}),
        "encode_order": Call(encode_order, {"scores": scores, "positions": positions.clamp(min=0)}, {}),
        "decode_order": Call(decode_order, {"keys": orders}, {}),
        "encode_candidates": Call(
            lambda positions, scores, rank: encode_candidates(positions, scores, layout=layout, rank=rank),
            {"positions": positions, "scores": scores},
            {"rank": 1},
            ("positions", "scores"),
            lambda positions, **_: choose_shard_candidates(positions).impl,
        ),
        "chosen_positions": Call(
            chosen_positions,
            {"keys": orders},
            {},
            (),
            lambda keys: choose_shard_candidates(keys).impl,
        ),
    }
