"""Sparse MLA decode from FP8 rows: a pool of 1M rows (688 MB, far beyond L2), unrelated slots, top-k 2048, 64 heads."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.formats import FP8_MLA
from cptools.kernels.sparse_mla.decode import choose_sparse_mla_decode, sparse_mla_decode
from cptools.kernels.sparse_mla.decode_reference import sparse_mla_decode_reference

POOL_ROWS = 1 << 20
COLUMNS = 2048
HEADS = 64
SCALE = 256**-0.5
SHAPES = (  # batch, query tokens each, target, beyond
    (1, 1, 12.0, 10.0),
    (16, 1, 23.0, 20.0),
    (64, 1, 69.0, 60.0),
    (128, 1, 115.0, 95.0),
    (128, 2, 226.0, 185.0),
)


def random_pool(rows: int) -> torch.Tensor:
    pool = torch.empty(rows, FP8_MLA.row_bytes, dtype=torch.uint8, device="cuda")
    for start in range(0, rows, 1 << 16):
        count = min(1 << 16, rows - start)
        latent, rope = torch.randn(count, 512, device="cuda"), torch.randn(count, 64, device="cuda")
        pool[start : start + count] = FP8_MLA.pack(latent, rope)
    return pool


def rows(*, impl: str = "auto", shapes: tuple[tuple[int, int, float, float], ...] = SHAPES) -> Iterator[Row]:
    """One row a shape, of the implementation that serves it, or of the one named."""
    torch.manual_seed(0)
    pool = random_pool(POOL_ROWS)
    for batch, tokens_each, target, beyond in shapes:
        tokens = batch * tokens_each
        query = torch.randn(tokens, HEADS, 576, device="cuda").bfloat16()
        slots = torch.stack([torch.randperm(POOL_ROWS, device="cuda")[:COLUMNS] for _ in range(tokens)]).int()
        checked = slice(0, min(tokens, 16))
        reference, _ = sparse_mla_decode_reference(
            query[checked].float(), pool, slots[checked], None, row_format=FP8_MLA, scale=SCALE
        )

        def attend(query: torch.Tensor = query, slots: torch.Tensor = slots) -> torch.Tensor:
            return sparse_mla_decode(
                query, pool, slots, row_format=FP8_MLA, scale=SCALE, out_dtype=torch.bfloat16, impl=impl
            )[0]

        poison = [torch.full((tokens, HEADS, 512), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        del poison  # freed memory holds NaN where the outputs will stand
        medians = graph_time_us(attend)
        moved = tokens * (COLUMNS * (FP8_MLA.row_bytes + 4) + HEADS * (576 + 512) * 2)
        yield Row(
            kernel="sparse_mla_decode",
            impl=choose_sparse_mla_decode(query, pool, slots, row_format=FP8_MLA, impl=impl).impl,
            shape=f"batch {batch} x {tokens_each}, {HEADS} heads, top-k {COLUMNS}, FP8 rows",
            median_us=statistics.median(medians),
            spread_us=max(medians) - min(medians),
            floor_us=floor_us(moved_bytes=moved, bf16_flop=2.0 * tokens * HEADS * (576 + 512) * COLUMNS),
            target_us=target,
            beyond_us=beyond,
            error=relative_error(attend()[checked], reference),
        )
