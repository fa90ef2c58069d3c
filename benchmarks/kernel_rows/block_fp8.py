"""Rows to FP8, and products with block-FP8 matrices at the widths of GLM-5.3.

Few rows: the floor is the matrix's bytes; launches take turns on matrices that together exceed L2. Rows are quantised
beforehand, as `rms_norm_quantise` leaves them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.kernels.block_fp8 import (
    BlockFP8,
    block_fp8_linear,
    choose_block_fp8_linear,
    choose_quantise_rows,
    quantise_rows,
)
from cptools.kernels.rowwise.norm_fp8 import choose_rms_norm_quantise, rms_norm_quantise

HIDDEN = 6144
L2_BYTES = 150_000_000
# outputs, columns: q_a, q_b, o, gate and up of an expert, its down
MATRICES = ((2048, HIDDEN), (16384, 2048), (HIDDEN, 16384), (4096, HIDDEN), (HIDDEN, 2048))
# torch's scaled_mm with block scales, microseconds, as measured on an H200
SCALED_MM = {(2048, 16384, 2048): 130.0, (2048, HIDDEN, 16384): 370.0, (8192, 16384, 2048): 549.0}


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    yield from quantised()
    for outputs, columns in MATRICES:
        for tokens in (1, 64):
            yield product(tokens, outputs, columns)
    for tokens, outputs, columns in SCALED_MM:
        yield product(tokens, outputs, columns)


def quantised() -> Iterator[Row]:
    gain = torch.ones(HIDDEN, device="cuda").bfloat16()
    for tokens in (1, 128, 8192):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        normed, values = rms_norm_quantise(x, gain, 1e-5)
        for kernel, impl, moved, medians, error in (
            (
                "quantise_rows",
                choose_quantise_rows(x).impl,
                3,
                graph_time_us(lambda x=x: quantise_rows(x)),
                relative_error(quantise_rows(x).dequantise(), quantise_rows(x, impl="reference").dequantise()),
            ),
            (
                "rms_norm_quantise",
                choose_rms_norm_quantise(x).impl,
                5,
                graph_time_us(lambda x=x: rms_norm_quantise(x, gain, 1e-5)),
                relative_error(values.dequantise(), quantise_rows(normed, impl="reference").dequantise()),
            ),
        ):
            yield Row(
                kernel=kernel,
                impl=impl,
                shape=f"{tokens} x {HIDDEN} BF16",
                median_us=statistics.median(medians),
                spread_us=max(medians) - min(medians),
                floor_us=floor_us(moved_bytes=moved * tokens * HIDDEN),
                target_us=None,
                beyond_us=None,
                error=error,
            )


def product(tokens: int, outputs: int, columns: int) -> Row:
    size = outputs * columns
    matrices = [
        BlockFP8(
            torch.randn(outputs, columns, device="cuda").mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn),
            torch.rand(outputs // 128, columns // 128, device="cuda") + 0.5,
        )
        for _ in range(max(2, -(-L2_BYTES // size)))
    ]
    x = quantise_rows(torch.randn(tokens, columns, device="cuda").bfloat16())
    poison = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    del poison  # freed memory holds NaN where the output will stand
    out = block_fp8_linear(x, matrices[0])
    expected = block_fp8_linear(x, matrices[0], out_dtype=torch.float32, impl="reference")
    turn = itertools.cycle(matrices)
    medians = graph_time_us(lambda: block_fp8_linear(x, next(turn)), launches=min(len(matrices), 12))
    moved = size + tokens * (columns + 2 * outputs)
    return Row(
        kernel="block_fp8_linear",
        impl=choose_block_fp8_linear(x, matrices[0]).impl,
        shape=f"{tokens} x {columns} by {outputs} x {columns}",
        median_us=statistics.median(medians),
        spread_us=max(medians) - min(medians),
        floor_us=floor_us(moved_bytes=moved, fp8_flop=2 * tokens * size),
        target_us=SCALED_MM.get((tokens, outputs, columns)),
        beyond_us=None,
        error=relative_error(out, expected),
    )
