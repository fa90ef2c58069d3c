"""Experts of GLM-5.3, 8 of 256 for each token by uniform routing, block-FP8 and BF16, and the routing around them.

Targets: few tokens at 2.8 TB/s of the matrices that are touched, many at 600 (FP8) and 500 (BF16) TFLOP/s. Times take
in everything from BF16 rows in grouped order to BF16 rows: quantisation, both products, SwiGLU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.kernels.block_fp8 import BlockFP8
from cptools.kernels.expert_routing import choose_expert_routing, combine, group_by_expert, route
from cptools.kernels.grouped_swiglu import choose_grouped_swiglu, grouped_swiglu

EXPERTS, TOP_K, HIDDEN, WIDTH = 256, 8, 6144, 2048
FEW_BYTES_PER_S, FP8_TARGET, BF16_TARGET = 2.8e12, 600e12, 500e12


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    yield from routing()
    for fp8, tokens in ((True, (1, 16, 64, 512, 2048, 4096, 8192)), (False, (1, 64, 2048, 8192))):
        weights = experts(fp8)
        for count in tokens:
            yield feed_forward(count, weights, fp8)
        del weights


def matrix(outputs: int, columns: int, fp8: bool) -> BlockFP8 | torch.Tensor:
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    values = torch.empty(EXPERTS, outputs, columns, dtype=dtype, device="cuda")
    for expert in values:
        drawn = torch.randn(outputs, columns, dtype=torch.bfloat16, device="cuda")
        expert.copy_((drawn * 100).clamp(-448, 448) if fp8 else drawn * columns**-0.5)
    if not fp8:
        return values
    scales = torch.rand(EXPERTS, outputs // 128, columns // 128, device="cuda") + 0.5
    return BlockFP8(values, scales * 0.01 * columns**-0.5)


def experts(fp8: bool) -> tuple[BlockFP8 | torch.Tensor, BlockFP8 | torch.Tensor]:
    return matrix(2 * WIDTH, HIDDEN, fp8), matrix(HIDDEN, WIDTH, fp8)


def feed_forward(tokens: int, weights: tuple, fp8: bool) -> Row:
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, 1).indices
    counts = group_by_expert(chosen, EXPERTS).counts
    pairs = tokens * TOP_K
    x = torch.randn(pairs, HIDDEN, device="cuda").bfloat16()
    poison = torch.full((pairs, HIDDEN), torch.nan, dtype=torch.bfloat16, device="cuda")
    del poison  # freed memory holds NaN where the output will stand
    out = grouped_swiglu(x, counts, *weights)
    # Against the reference for the first experts that have rows: it is slow.
    start = int(counts.nonzero()[0])
    checked = slice(start, start + 4)
    some = int(counts[checked].sum())
    wide = [w[checked] if isinstance(w, BlockFP8) else w[checked].float() for w in weights]
    expected = grouped_swiglu(x[:some].float(), counts[checked], *wide, impl="reference")
    many = tokens >= 512
    medians = graph_time_us(lambda: grouped_swiglu(x, counts, *weights), launches=2 if many else 6, replays=6)
    touched = int((counts > 0).sum())
    flop = 6 * pairs * HIDDEN * WIDTH
    weight_bytes = touched * 3 * HIDDEN * WIDTH * (1 if fp8 else 2)
    moved = weight_bytes + 4 * pairs * HIDDEN
    few_us = 1e6 * weight_bytes / FEW_BYTES_PER_S
    many_us = 1e6 * flop / (FP8_TARGET if fp8 else BF16_TARGET)
    return Row(
        kernel="grouped_swiglu",
        impl=choose_grouped_swiglu(x, *weights).impl,
        shape=f"{'FP8' if fp8 else 'BF16'}, {tokens} tokens, {touched} experts touched",
        median_us=statistics.median(medians),
        spread_us=max(medians) - min(medians),
        floor_us=floor_us(moved_bytes=moved, **{"fp8_flop" if fp8 else "bf16_flop": flop}),
        target_us=max(few_us, many_us),
        beyond_us=None,
        error=relative_error(out[:some], expected),
    )


def routing() -> Iterator[Row]:
    bias = torch.randn(EXPERTS, device="cuda")
    for tokens in (1, 64, 8192):
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        chosen, gates = route(logits, bias, k=TOP_K)
        groups = group_by_expert(chosen, EXPERTS)
        outputs = torch.randn(tokens * TOP_K, HIDDEN, device="cuda").bfloat16()
        expected = (outputs[groups.slots].float() * gates.unsqueeze(2)).sum(1)
        impl = choose_expert_routing(logits, experts=EXPERTS, k=TOP_K).impl
        for kernel, moved, medians, error in (
            ("route", 4 * EXPERTS + 12 * TOP_K, graph_time_us(lambda x=logits: route(x, bias, k=TOP_K)), -1.0),
            ("group_by_expert", 24 * TOP_K, graph_time_us(lambda x=chosen: group_by_expert(x, EXPERTS)), -1.0),
            (
                "combine",
                2 * HIDDEN * (TOP_K + 1),
                graph_time_us(lambda x=outputs, s=groups.slots, g=gates: combine(x, s, g)),
                relative_error(combine(outputs, groups.slots, gates), expected),
            ),
        ):
            yield Row(
                kernel=kernel,
                impl=impl,
                shape=f"{tokens} tokens, {TOP_K} of {EXPERTS}",
                median_us=statistics.median(medians),
                spread_us=max(medians) - min(medians),
                floor_us=floor_us(moved_bytes=tokens * moved),
                target_us=None,
                beyond_us=None,
                error=error,
            )
