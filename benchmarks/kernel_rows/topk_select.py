"""Exact top-2048 of normal scores. Each launch reads other scores; those of one row stay in L2, as fresh ones would."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Literal

import torch

from benchmarks.gpu_timing import Row, floor_us, graph_time_us
from cptools.kernels.topk_select import choose_merge_orders, choose_topk_select, encode_order, merge_orders, topk_select

Order = Literal["none", "position", "score"]
K = 2048
LAUNCHES = 10
# rows, length, time of the best peer (microseconds); the target is 1.3 x the peer, beyond is the peer
SHAPES = (
    (1, 131072, 20.8),
    (64, 32768, 20.3),
    (64, 131072, 47.4),
    (2048, 65536, 493.0),
)


def exact(scores: torch.Tensor, impl: str) -> float:
    """-1 if the selection of sorted_by="none" has the reference's members, NaN if not."""
    poison = torch.full((scores.shape[0], K), 7, dtype=torch.int32, device="cuda")
    del poison  # freed memory holds wrong positions where the output will stand
    positions, _ = topk_select(scores, K, sorted_by="none", positions_dtype=torch.int32, impl=impl)
    wanted, _ = topk_select(scores, K, impl="reference")
    return -1.0 if torch.equal(positions.long().sort(dim=1).values, wanted.sort(dim=1).values) else torch.nan


def rows(*, impl: str = "auto", shapes: tuple[tuple[int, int, float], ...] = SHAPES) -> Iterator[Row]:
    """One row a shape and order. The peers give their selection unsorted: only sorted_by="none" has a target."""
    torch.manual_seed(0)
    for count, length, peer in shapes:
        bytes_apart = count * length * 4
        inputs = [torch.randn(count, length, device="cuda") for _ in range(min(LAUNCHES, 2 + (1 << 29) // bytes_apart))]
        error = exact(inputs[0][:64], impl)
        orders: tuple[Order, ...] = ("none", "position", "score")
        for sorted_by in orders:
            turn = itertools.cycle(inputs)

            def select(turn: Iterator[torch.Tensor] = turn, sorted_by: Order = sorted_by) -> object:
                dtype = torch.int32 if sorted_by == "none" else torch.int64
                return topk_select(next(turn), K, sorted_by=sorted_by, positions_dtype=dtype, impl=impl)

            medians = graph_time_us(select, launches=LAUNCHES)
            yield Row(
                kernel="topk_select",
                impl=choose_topk_select(inputs[0], K, impl=impl).impl,
                shape=f"{count} x {length}, top-{K}, sorted_by={sorted_by}",
                median_us=statistics.median(medians),
                spread_us=max(medians) - min(medians),
                floor_us=floor_us(moved_bytes=bytes_apart + count * K * (8 if sorted_by == "none" else 12)),
                target_us=1.3 * peer if sorted_by == "none" else None,
                beyond_us=peer if sorted_by == "none" else None,
                error=error,
            )
    keys = encode_order(torch.randn(64, 8 * K, device="cuda"), torch.arange(8 * K, device="cuda"))
    medians = graph_time_us(lambda: merge_orders(keys, K, impl=impl), launches=LAUNCHES)
    same = torch.equal(merge_orders(keys, K, impl=impl), merge_orders(keys, K, impl="reference"))
    yield Row(
        kernel="merge_orders",
        impl=choose_merge_orders(keys, K, impl=impl).impl,
        shape=f"64 x {8 * K} keys, top-{K}, sorted",
        median_us=statistics.median(medians),
        spread_us=max(medians) - min(medians),
        floor_us=floor_us(moved_bytes=64 * 9 * K * 8),
        target_us=None,
        beyond_us=None,
        error=-1.0 if same else torch.nan,
    )
