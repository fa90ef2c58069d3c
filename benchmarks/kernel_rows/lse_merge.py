"""Merge of two BF16 partials of 64 heads x 512.

"from L2": launches share one set of buffers, as partials are that attention has just written; the peers' figures below
4096 tokens are of this kind (64 tokens in 3.5 us would be above the rate of HBM). "from HBM": launches take turns on
sets that together exceed L2.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.kernels.lse_merge import choose_merge_states, merge_states

HEADS, DIM, PARTS = 64, 512, 2
# tokens, sets of buffers, best peer (microseconds)
SHAPES = ((1, 1, 1.9), (64, 1, 3.5), (256, 1, 13.7), (64, 10, None), (256, 10, None), (4096, 2, 189.0))


def rows(*, impl: str = "auto") -> Iterator[Row]:
    torch.manual_seed(0)
    for tokens, turns, peer in SHAPES:
        inputs = [
            (
                list(torch.randn(PARTS, tokens, HEADS, DIM, device="cuda").bfloat16()),
                list(torch.randn(PARTS, tokens, HEADS, device="cuda")),
            )
            for _ in range(turns)
        ]
        outs, lses = inputs[0]
        poison = torch.full((tokens, HEADS, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
        del poison  # freed memory holds NaN where the output will stand
        merged, _ = merge_states(outs, lses, out_dtype=torch.bfloat16, impl=impl)
        expected, _ = merge_states(outs, lses, impl="reference")
        turn = itertools.cycle(inputs)
        medians = graph_time_us(
            lambda turn=turn: merge_states(*next(turn), out_dtype=torch.bfloat16, impl=impl),
            launches=10,
        )
        yield Row(
            kernel="lse_merge",
            impl=choose_merge_states(outs, out_dtype=torch.bfloat16, impl=impl).impl,
            shape=f"{tokens} tokens, 2 parts, BF16, from {'L2' if turns == 1 else 'HBM'}",
            median_us=statistics.median(medians),
            spread_us=max(medians) - min(medians),
            floor_us=floor_us(moved_bytes=tokens * HEADS * ((PARTS + 1) * (DIM * 2 + 4))),
            target_us=peer,
            beyond_us=None,
            error=relative_error(merged, expected),
        )
