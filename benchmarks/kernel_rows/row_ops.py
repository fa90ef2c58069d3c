"""What stands between the products of a layer: norms, rotation, the indexer's queries, slots of selected positions.

Each at a decode batch, where a launch is what it costs, and at a block of 4096 prompt rows, where bytes are. Launches
take turns on sets of buffers that exceed L2 together.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.kernels.index_query import choose_fp8_query, fp8_query
from cptools.kernels.rowwise import (
    RopeAngles,
    choose_rms_norm,
    choose_rope_interleaved,
    head_linear,
    rms_norm,
    rope_interleaved,
)
from cptools.kernels.selected_slots import choose_selected_slots, selected_slots
from cptools.layout import KVLayout

BATCHES = (1, 64, 4096)
L2_BYTES = 60 << 20
MAX_TURNS = 16


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def timed(make: Callable[[], Callable[[], object]], moved_bytes: int) -> list[float]:
    """Medians of calls that take turns on as many sets of buffers as L2 does not hold."""
    turns = max(1, min(MAX_TURNS, -(-2 * L2_BYTES // max(moved_bytes, 1))))
    turn = itertools.cycle([make() for _ in range(turns)])
    return graph_time_us(lambda: next(turn)(), launches=max(10, turns))


def row(kernel: str, impl: str, shape: str, medians: list[float], floor: float, error: float) -> Row:
    return Row(
        kernel=kernel,
        impl=impl,
        shape=shape,
        median_us=statistics.median(medians),
        spread_us=max(medians) - min(medians),
        floor_us=floor,
        target_us=None,
        beyond_us=None,
        error=error,
    )


def norms(tokens: int, impl: str) -> Row:
    weight, x = bf16(6144), bf16(tokens, 6144)

    def make() -> Callable[[], object]:
        x = bf16(tokens, 6144)
        return lambda: rms_norm(x, weight, 1e-5, impl=impl)

    moved = 4 * tokens * 6144
    error = relative_error(
        rms_norm(x, weight, 1e-5, impl=impl), rms_norm(x.float(), weight.float(), 1e-5, impl="reference")
    )
    chosen = choose_rms_norm(x, weight, impl=impl).impl
    return row("rms_norm", chosen, f"{tokens} x 6144, BF16", timed(make, moved), floor_us(moved_bytes=moved), error)


def rotations(tokens: int, impl: str) -> Row:
    angles = RopeAngles.at(torch.randint(0, 1 << 20, (tokens,), device="cuda"), 64, 1e4)

    def part() -> Tensor:
        return bf16(tokens, 64, 256)[..., 192:]

    def make() -> Callable[[], object]:
        x = part()
        return lambda: rope_interleaved(x, angles, impl=impl)

    x, moved = part(), 4 * tokens * 64 * 64
    error = relative_error(
        rope_interleaved(x, angles, impl=impl), rope_interleaved(x.float(), angles, impl="reference")
    )
    chosen = choose_rope_interleaved(x, angles, impl=impl).impl
    shape = f"{tokens} x 64 heads x 64 of 256, BF16"
    return row("rope_interleaved", chosen, shape, timed(make, moved), floor_us(moved_bytes=moved), error)


def index_queries(tokens: int, impl: str) -> Row:
    angles = RopeAngles.at(torch.randint(0, 1 << 20, (tokens,), device="cuda"), 64, 1e4)
    weights = torch.randn(tokens, 32, device="cuda")

    def make() -> Callable[[], object]:
        query = bf16(tokens, 32, 128)
        return lambda: fp8_query(query, weights, angles, impl=impl)

    query, moved = bf16(tokens, 32, 128), tokens * 32 * (3 * 128 + 8)
    ours, theirs = (fp8_query(query, weights, angles, impl=name) for name in (impl, "reference"))
    exact = all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
    chosen = choose_fp8_query(query, weights, angles, impl=impl).impl
    shape = f"{tokens} x 32 heads x 128, BF16 to FP8"
    return row("fp8_query", chosen, shape, timed(make, moved), floor_us(moved_bytes=moved), -1.0 if exact else 1.0)


def slots(tokens: int, impl: str) -> Row:
    layout = KVLayout(8)
    tables = torch.randperm(tokens * 64, device="cuda").view(tokens, 64)
    ids = torch.arange(tokens, device="cuda")
    positions = torch.randint(0, 64 * layout.virtual_block, (tokens, 2048), device="cuda").sort(1).values
    out = torch.empty(tokens, 2048, dtype=torch.int32, device="cuda")

    def run() -> None:
        selected_slots(out, positions, ids, tables, layout=layout, rank=3, impl=impl)

    run()
    want = torch.full_like(out, 77)
    selected_slots(want, positions, ids, tables, layout=layout, rank=3, impl="reference")
    error, moved = -1.0 if torch.equal(out, want) else 1.0, 12 * out.numel()
    chosen = choose_selected_slots(positions, tables, impl=impl).impl
    medians = graph_time_us(run, launches=10)
    return row("selected_slots", chosen, f"{tokens} x 2048, 8 ranks", medians, floor_us(moved_bytes=moved), error)


def head_products(tokens: int) -> Row:
    """Not a kernel of ours: queries into the space of the rows, read and written in place."""
    weight = bf16(64, 192, 512)

    def make() -> Callable[[], object]:
        x, room = bf16(tokens, 64, 256)[..., :192], bf16(tokens, 64, 576)
        return lambda: head_linear(x, weight, out=room[..., :512])

    moved = 2 * (weight.numel() + tokens * 64 * (192 + 512))
    floor = floor_us(moved_bytes=moved, bf16_flop=2.0 * tokens * 64 * 192 * 512)
    x = bf16(tokens, 64, 256)[..., :192]
    error = relative_error(head_linear(x, weight), torch.einsum("thd,hdo->tho", x.float(), weight.float()))
    return row("head_linear", "torch", f"{tokens} x 64 heads, 192 to 512, BF16", timed(make, moved), floor, error)


def rows(*, impl: str = "auto") -> Iterator[Row]:
    torch.manual_seed(0)
    for tokens in BATCHES:
        yield norms(tokens, impl)
        yield rotations(tokens, impl)
        yield index_queries(tokens, impl)
        if tokens <= 64:
            yield slots(tokens, impl)
        yield head_products(tokens)
