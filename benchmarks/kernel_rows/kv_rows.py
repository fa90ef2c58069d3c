"""Packed rows out of pages, unpacked to BF16, and over the bus from pinned memory, 656 bytes each, random order."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_timing import Row, floor_us, graph_time_us, relative_error
from cptools.formats import FP8_MLA
from cptools.kernels.kv_gather import (
    choose_copy_rows,
    choose_gather_rows,
    choose_unpack_rows,
    copy_rows,
    gather_rows,
    unpack_rows,
)
from cptools.kernels.kv_store import store_rows

PAGES, PAGE_SIZE = 8192, 64
BUS_BYTES_PER_S = 55.3e9
"""Pinned host memory to an H200, as measured."""
# rows, target, beyond (microseconds)
UNPACKED = ((32768, 18.0, None), (131072, 67.0, None))
COPIED = ((204, 8.4, None), (2048, 33.6, None), (6528, 94.5, None), (65536, 894.0, 860.0))


def row(kernel: str, impl: str, shape: str, run: Callable[[], object], floor: float, error: float, *,
        target: float | None = None, beyond: float | None = None, launches: int = 4) -> Row:  # fmt: skip
    medians = graph_time_us(run, launches=launches)
    return Row(
        kernel=kernel,
        impl=impl,
        shape=shape,
        median_us=statistics.median(medians),
        spread_us=max(medians) - min(medians),
        floor_us=floor,
        target_us=target,
        beyond_us=beyond,
        error=error,
    )


def random_rows(count: int) -> Tensor:
    """Packed rows of random values."""
    return FP8_MLA.pack(torch.randn(count, 512, device="cuda"), torch.randn(count, 64, device="cuda"))


def rows(*, impl: str = "auto") -> Iterator[Row]:
    torch.manual_seed(0)
    planes, width = FP8_MLA.planes, FP8_MLA.row_bytes
    pages = random_rows(PAGES * PAGE_SIZE).view(PAGES, PAGE_SIZE * width)
    for count in (2048, 32768):
        slots = torch.randperm(PAGES * PAGE_SIZE, device="cuda")[:count]
        sizes = {"planes": planes, "page_size": PAGE_SIZE}
        gathered = gather_rows(pages, slots, **sizes, impl=impl)
        same = torch.equal(gathered, pages.view(-1, width)[slots])
        choice = choose_gather_rows(pages, slots, planes=planes, impl=impl).impl
        floor = floor_us(moved_bytes=2 * count * width)
        shape = f"{count} rows of {width} B"
        run = lambda slots=slots: gather_rows(pages, slots, planes=planes, page_size=PAGE_SIZE, impl=impl)
        yield row("gather_rows", choice, shape, run, floor, -1.0 if same else torch.nan)
        fresh = random_rows(count)
        store_rows(pages, slots, fresh, planes=planes, page_size=PAGE_SIZE, impl=impl)
        same = torch.equal(pages.view(-1, width)[slots], fresh)
        run = lambda slots=slots, fresh=fresh: store_rows(
            pages, slots, fresh, planes=planes, page_size=PAGE_SIZE, impl=impl
        )
        yield row("store_rows", choice, shape, run, floor, -1.0 if same else torch.nan)
    for count, target, beyond in UNPACKED:
        packed = pages.view(-1, width)[:count]
        joint = unpack_rows(packed, None, row_format=FP8_MLA, page_size=1, impl=impl)
        run = lambda packed=packed: unpack_rows(packed, None, row_format=FP8_MLA, page_size=1, impl=impl)
        choice = choose_unpack_rows(packed, None, row_format=FP8_MLA, impl=impl).impl
        floor = floor_us(moved_bytes=count * (width + 2 * 576))
        error = relative_error(joint, FP8_MLA.unpack_joint(packed))
        yield row("unpack_rows", choice, f"{count} FP8 rows to BF16", run, floor, error, target=target, beyond=beyond)
    source = random_rows(4 * 65536).cpu().pin_memory()
    # The bus falls asleep while the host makes rows; a short copy would be timed while it wakes up.
    everything = torch.arange(65536, device="cuda")
    out = torch.empty(65536, width, dtype=torch.uint8, device="cuda")
    for _ in range(100):
        copy_rows(source, everything, out, everything, impl=impl)
    for count, target, beyond in COPIED:
        here = torch.randperm(source.shape[0], device="cuda")[:count]
        there = torch.randperm(count, device="cuda")
        out = torch.full((count, width), 0xEE, dtype=torch.uint8, device="cuda")
        run = lambda here=here, there=there, out=out: copy_rows(source, here, out, there, impl=impl)
        run()
        same = torch.equal(out[there].cpu(), source[here.cpu()])
        choice = choose_copy_rows(source, here, out, there, impl=impl).impl
        floor = 1e6 * count * width / BUS_BYTES_PER_S
        shape = f"{count} rows of {width} B from pinned memory"
        error = -1.0 if same else torch.nan
        yield row(
            "copy_rows",
            choice,
            shape,
            run,
            floor,
            error,
            target=target,
            beyond=beyond,
            launches=10 if count < 10000 else 2,
        )
