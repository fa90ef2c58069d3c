"""Sparse MLA prefill: top-k 2048, 64 heads, BF16 rows (38 MB, about L2, or 151 MB, far above) and FP8 rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.formats import FP8_MLA, MlaRows
from cptools.kernels.sparse_mla import choose_sparse_mla, reference, sparse_mla

COLUMNS = 2048
HEADS = 64
SCALE = 256**-0.5
CHECKED = 32  # queries compared with the reference
# queries, rows, what the ids are, row format, target, beyond (microseconds)
SHAPES = (
    (2048, 32768, "unrelated", None, 980.0, 880.0),
    (4096, 131072, "unrelated", None, 2500.0, 2250.0),
    (4096, 131072, "neighbours share 80 %", None, 2280.0, 1950.0),
    (2048, 32768, "unrelated", FP8_MLA, 998.0, 980.0),
    (4096, 131072, "unrelated", FP8_MLA, 2567.0, 2500.0),
)


def unrelated_ids(tokens: int, rows: int) -> torch.Tensor:
    """Distinct rows for each query, spread over all of them."""
    step = torch.randint(0, rows, (tokens, 1), device="cuda")
    return (
        torch.stack([torch.randperm(rows, device="cuda")[:COLUMNS] for _ in range(64)])
        .repeat(-(-tokens // 64), 1)[:tokens]
        .add(step)
        .remainder(rows)
        .int()
    )


def sharing_ids(tokens: int, rows: int, shared: float) -> torch.Tensor:
    """Each query takes this part of its rows from the query before it."""
    ids = unrelated_ids(tokens, rows)
    for token in range(1, tokens):
        kept = torch.rand(COLUMNS, device="cuda") < shared
        ids[token] = torch.where(kept, ids[token - 1], ids[token])
    return ids


def packed(values: torch.Tensor, row_format: MlaRows | None) -> torch.Tensor:
    if row_format is None:
        return values
    parts = values.split(1 << 15)
    return torch.cat([row_format.pack(part[:, : row_format.latent], part[:, row_format.latent :]) for part in parts])


def rows(
    *, impl: str = "auto", shapes: tuple[tuple[int, int, str, MlaRows | None, float, float], ...] = SHAPES
) -> Iterator[Row]:
    """One row a shape, of the implementation that serves it, or of the one named. FP8 rows: up-conversion included."""
    torch.manual_seed(0)
    for tokens, num_rows, relation, row_format, target, beyond in shapes:
        query = torch.randn(tokens, HEADS, 576, device="cuda").bfloat16()
        values = torch.randn(num_rows, 576, device="cuda").bfloat16()
        keys = packed(values, row_format)
        ids = unrelated_ids(tokens, num_rows) if relation == "unrelated" else sharing_ids(tokens, num_rows, 0.8)
        if row_format is not None:
            values = row_format.unpack_joint(keys).bfloat16()
        wanted, _ = reference.sparse_mla(query[:CHECKED], values, ids[:CHECKED], scale=SCALE, v_dim=512)

        def attend(
            query: torch.Tensor = query,
            keys: torch.Tensor = keys,
            ids: torch.Tensor = ids,
            row_format: MlaRows | None = row_format,
        ) -> torch.Tensor:
            return sparse_mla(
                query,
                keys,
                ids,
                scale=SCALE,
                v_dim=512,
                row_format=row_format,
                out_dtype=torch.bfloat16,
                impl=impl,
            )[0]

        poison = torch.full((tokens, HEADS, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        del poison  # freed memory holds NaN where the output will stand
        error = relative_error(attend()[:CHECKED], wanted)
        medians = []
        for _ in range(5):
            time.sleep(0.1)  # back to back, the board's power limit would clock every kernel down by about 15 %
            medians += graph_time_us(attend, launches=3, replays=5, rounds=1)
        row_bytes = 1152 if row_format is None else row_format.row_bytes
        moved = num_rows * row_bytes + tokens * (COLUMNS * 4 + HEADS * (576 + 512) * 2)
        yield Row(
            kernel="sparse_mla",
            impl=choose_sparse_mla(query, keys, ids, scale=SCALE, v_dim=512, row_format=row_format, impl=impl).impl,
            shape=f"{tokens} queries x {num_rows} {'BF16' if row_format is None else 'FP8'} rows, {relation}, "
            f"{HEADS} heads, top-k {COLUMNS}",
            median_us=statistics.median(medians),
            spread_us=max(medians) - min(medians),
            floor_us=floor_us(moved_bytes=moved, bf16_flop=2.0 * tokens * HEADS * (576 + 512) * COLUMNS),
            target_us=target,
            beyond_us=beyond,
            error=error,
        )
