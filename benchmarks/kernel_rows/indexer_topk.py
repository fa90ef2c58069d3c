"""Indexer scores of FP8 queries and keys, 32 heads x 128, causal, and the fused selection of the 2048 best.

Contiguous keys for prompts, shuffled pages of 64 for decode (other pages each launch, so that none is in L2; where the
keys of a step fit there, also the same pages each launch). Columns beyond a row are left undefined, as selections that
take lengths allow.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.formats import FP8_INDEX, quantize_fp8
from cptools.kernels.indexer_topk import (
    IndexKeys,
    choose_indexer_scores,
    indexer_scores_fp8,
    indexer_topk_fp8,
)
from cptools.kernels.topk_select import topk_select

HEADS, DIM, K, PAGE = 32, 128, 2048, 64
# queries, keys, target (microseconds)
PROMPTS = ((2048, 131072, 2350.0), (4096, 32768, 1158.0), (8192, 65536, 4733.0))
DECODES = ((1, 131072, 5.6), (32, 32768, 38.7), (64, 65536, 139.6))
FUSED = ((2048, 131072, 2900.0), (2048, 1 << 20, None))
FUSED_ORDERS: tuple[Literal["score", "none"], ...] = ("score", "none")
L2_BYTES = 50 << 20
POOL_BYTES = 300 << 20  # pages that decode launches take turns in, several times L2


def problem(queries: int, count: int) -> tuple[Tensor, Tensor, IndexKeys, Tensor]:
    """The last ``queries`` tokens of a prompt of ``count``."""
    query, query_scale = quantize_fp8(torch.randn(queries, HEADS, DIM, device="cuda"))
    weights = torch.randn(queries, HEADS, device="cuda") * query_scale.squeeze(-1)
    values, scales = quantize_fp8(torch.randn(count, DIM, device="cuda"))
    lens = torch.arange(count - queries, count, device="cuda") + 1
    return query, weights, IndexKeys(values, scales.squeeze(-1)), lens


def error_of(scores: Tensor, query: Tensor, weights: Tensor, keys: Tensor, lens: Tensor) -> float:
    """Of the first and last rows, against fp32 products of the dequantised values."""
    worst = 0.0
    for row in (0, scores.shape[0] - 1):
        products = (query[row].float() @ keys[: lens[row]].T).relu()
        wanted = (weights[row].unsqueeze(1) * products).sum(0)
        worst = max(worst, relative_error(scores[row, : lens[row]], wanted))
    return worst


def measured(run: Callable[[], object], *, launches: int, replays: int) -> tuple[float, float]:
    medians = graph_time_us(run, launches=launches, replays=replays)
    return statistics.median(medians), max(medians) - min(medians)


def scores_then_selection(
    query: Tensor, weights: Tensor, keys: IndexKeys, lens: Tensor, sorted_by: Literal["score", "none"], impl: str
) -> object:
    scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens, fill=False, impl=impl)
    return topk_select(scores, K, lengths=lens, sorted_by=sorted_by)


def prompt_rows(impl: str) -> Iterator[Row]:
    for queries, count, target in PROMPTS:
        query, weights, keys, lens = problem(queries, count)

        run = functools.partial(indexer_scores_fp8, query, weights, keys, kv_lens=lens, fill=False, impl=impl)
        poison = torch.full((queries, count), torch.nan, device="cuda")
        del poison
        error = error_of(run(), query, weights, keys.dequantized()[0], lens)
        median, spread = measured(run, launches=2, replays=5)
        pairs = int(lens.sum())
        yield Row(
            kernel="indexer_scores",
            impl=choose_indexer_scores(query, keys, impl=impl).impl,
            shape=f"{queries} queries x {count} keys, causal",
            median_us=median,
            spread_us=spread,
            floor_us=floor_us(fp8_flop=2.0 * HEADS * DIM * pairs, moved_bytes=4.0 * pairs),
            target_us=target,
            beyond_us=None,
            error=error,
        )


def decode_rows(impl: str) -> Iterator[Row]:
    for requests, count, target in DECODES:
        blocks = requests * count // PAGE
        pages = FP8_INDEX.pack(torch.randn(1 << 16, DIM, device="cuda")).view(-1, PAGE, FP8_INDEX.row_bytes)
        pages = torch.cat([pages[:, :, :DIM].flatten(1), pages[:, :, DIM:].flatten(1)], 1)
        size = max(blocks, POOL_BYTES // pages.shape[1])
        pages = pages.repeat(-(-size // pages.shape[0]), 1)[:size]
        tables = [torch.randperm(size, device="cuda")[:blocks].view(requests, -1) for _ in range(8)]
        sources = [IndexKeys.from_pages(pages, table, page_size=PAGE) for table in tables]
        query, weights, _, _ = problem(requests, PAGE)
        lens = torch.full((requests,), count, device="cuda")
        score = functools.partial(indexer_scores_fp8, query, weights, kv_lens=lens, fill=False, impl=impl)
        one = IndexKeys(sources[0].values, sources[0].scales, tables[0][:1])
        error = error_of(score(sources[0])[:1], query[:1], weights[:1], one.dequantized()[0], lens[:1])
        for used in (sources, sources[:1]) if requests * count * DIM < L2_BYTES else (sources,):
            turn = itertools.cycle(used)
            median, spread = measured(lambda score=score, turn=turn: score(next(turn)), launches=8, replays=10)
            yield Row(
                kernel="indexer_scores, pages",
                impl=choose_indexer_scores(query, sources[0], impl=impl).impl,
                shape=f"{requests} requests x {count} keys{', in L2' if len(used) == 1 else ''}",
                median_us=median,
                spread_us=spread,
                floor_us=floor_us(moved_bytes=requests * count * (FP8_INDEX.row_bytes + 4.0)),
                target_us=target,
                beyond_us=None,
                error=error,
            )


def fused_rows(impl: str) -> Iterator[Row]:
    """Target: the scores, all stored, and the selection apart, as measured here."""
    for queries, count, beyond in FUSED:
        query, weights, keys, lens = problem(queries, count)

        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        positions, best = indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=K, impl=impl)
        results = positions.nbytes + best.nbytes
        workspace = torch.cuda.max_memory_allocated() - before - results
        part = slice(queries - 64, queries)
        scores = indexer_scores_fp8(query[part], weights[part], keys, kv_lens=lens[part], impl=impl)
        wanted = topk_select(scores, K, lengths=lens[part], impl="reference")
        exact = torch.equal(positions[part], wanted[0]) and torch.equal(best[part], wanted[1])
        del scores, wanted
        for sorted_by in FUSED_ORDERS:
            select = functools.partial(indexer_topk_fp8, query, weights, keys, kv_lens=lens, k=K, impl=impl)
            apart = functools.partial(scores_then_selection, query, weights, keys, lens, sorted_by, impl)
            median, spread = measured(lambda select=select, by=sorted_by: select(sorted_by=by), launches=1, replays=4)
            yield Row(
                kernel="indexer_topk",
                impl=choose_indexer_scores(query, keys, impl=impl).impl,
                shape=f"{queries} x {count}, top-{K}, sorted_by={sorted_by}, {workspace >> 20} MiB beside results",
                median_us=median,
                spread_us=spread,
                floor_us=floor_us(fp8_flop=2.0 * HEADS * DIM * int(lens.sum())),
                target_us=measured(apart, launches=1, replays=4)[0],
                beyond_us=beyond,
                error=-1.0 if exact else torch.nan,
            )


def rows(*, impl: str = "auto") -> Iterator[Row]:
    torch.manual_seed(0)
    yield from prompt_rows(impl)
    yield from decode_rows(impl)
    yield from fused_rows(impl)
