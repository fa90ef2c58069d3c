"""Times on a GPU, and the floor that the machine sets them: what every kernel benchmark shares."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES_PER_S = 4.3e12
"""Device copy, read and written, as measured on an H200."""
BF16_FLOP_PER_S = 790e12
"""8192^3 matrix product on random data, as measured on an H200."""
FP8_FLOP_PER_S = 1580e12
"""Twice the BF16 rate."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a kernel at a shape, its time, and what it is held against (all microseconds)."""

    kernel: str
    impl: str
    shape: str
    median_us: float
    spread_us: float
    """Largest minus smallest of the medians of repeated measurements."""
    floor_us: float
    target_us: float | None
    beyond_us: float | None
    error: float
    """norm(out - reference) / norm(reference), the reference in float32 or better; -1 where exactness was checked."""

    @property
    def met(self) -> bool | None:
        return None if self.target_us is None else self.median_us <= self.target_us


def floor_us(*, moved_bytes: float = 0.0, bf16_flop: float = 0.0, fp8_flop: float = 0.0) -> float:
    """The larger of the times that the bytes and the operations need at the machine's measured rates."""
    arithmetic = bf16_flop / BF16_FLOP_PER_S + fp8_flop / FP8_FLOP_PER_S
    return 1e6 * max(moved_bytes / COPY_BYTES_PER_S, arithmetic)


def graph_time_us(run: Callable[[], object], *, launches: int = 10, replays: int = 20, rounds: int = 3) -> list[float]:
    """Medians over ``replays`` replays of a CUDA graph of ``launches`` calls, one per round, microseconds a call.

    ``run`` must be capturable: no sync, fixed addresses. It is called a few times before capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    medians = []
    for _ in range(rounds):
        times = []
        for _ in range(replays):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / launches)
        medians.append(statistics.median(times))
    return medians


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """norm(out - reference) / norm(reference) in float64; NaN never passes for small."""
    wide = reference.double()
    return ((out.double() - wide).norm() / wide.norm()).item()
