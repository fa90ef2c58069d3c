"""Host time to plan one step of an engine: shard plan, block tables, slots.

    python benchmarks/plan_speed.py [--repeats 30] [--out benchmarks/results/plan_speed.json]

All that the host does for a step, by the calls that the model makes. "prefill": one rank's part of a step that computes
a prompt of 1,048,576 tokens over 8 ranks, with the KV split over the same 8: pages and block table, the shard plan, the
causal limits of its rows and the slots of all new tokens, as each rank stores the rows it owns of what it gathers.
"decode": one step of 256 requests with contexts of 1K to 128K tokens, one new token each.
Medians of wall time with two threads. The exit code says whether both are within their targets.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from cptools import KVLayout, LoadBalancedCPShard, RoundRobinKVShard
from cptools.block_tables import BlockTables
from cptools.cp_kv import ContextParallelKV
from cptools.formats import FP8_INDEX, FP8_MLA
from cptools.page_allocator import PageAllocator
from cptools.step_plan import make_step_plan

RANKS = 8
PROMPT_TOKENS = 1_048_576
DECODE_REQUESTS = 256
TARGET_MS = {"prefill": 50.0, "decode": 2.0}
THREADS = 2


class Clock:
    """Milliseconds of the named parts of a step, over its repetitions."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    def medians(self) -> dict[str, float]:
        """Median of each part, and of the sum of the parts."""
        totals = [sum(times) for times in zip(*self._times.values(), strict=True)]
        every = self._times | {"total": totals}
        return {name: round(statistics.median(times), 3) for name, times in every.items()}


def engine(num_pages: int) -> tuple[ContextParallelKV, BlockTables]:
    """One rank's cache of an 8-rank engine, with no row in it: planning needs no group and no memory."""
    kv = RoundRobinKVShard(world_size=RANKS, rank=0)
    cache = ContextParallelKV(
        cp=LoadBalancedCPShard(world_size=RANKS, rank=0),
        kv=kv,
        merge=None,
        mla=FP8_MLA,
        index=FP8_INDEX,
        num_layers=0,
        index_layers=(),
        num_pages=0,
    )
    return cache, BlockTables(kv.layout, PageAllocator(num_pages))


def prefill(repeats: int) -> dict[str, float]:
    clock = Clock()
    for _ in range(repeats):
        cache, tables = engine(2 * PROMPT_TOKENS // (64 * RANKS))
        request = tables.open()
        with clock.part("tables"):
            tables.reserve({request: PROMPT_TOKENS})
            table = tables.table([request])
        with clock.part("shard plan"):
            plan = make_step_plan(cache.cp.plan([PROMPT_TOKENS]), table)
        with clock.part("slots"):
            cache.begin(plan)
    return clock.medians()


def decode(repeats: int) -> dict[str, float]:
    contexts = np.random.default_rng(0).integers(1024, 131_072, DECODE_REQUESTS)
    cache, tables = engine(int(KVLayout(RANKS).pages(contexts + repeats).sum()))
    requests = [tables.open() for _ in contexts]
    tables.reserve(dict(zip(requests, contexts.tolist(), strict=True)))
    clock = Clock()
    for step in range(repeats):
        lens = contexts + step
        with clock.part("tables"):
            tables.reserve(dict(zip(requests, (lens + 1).tolist(), strict=True)))
            table = tables.table(requests)
        with clock.part("shard plan"):
            plan = make_step_plan(
                cache.cp.plan([]), tables.table([]), decode_context_lens=lens.tolist(), decode_tables=table
            )
        with clock.part("slots"):
            cache.begin(plan)
    return clock.medians()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="runs of each, at least 20")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    arguments = parser.parse_args()
    if arguments.repeats < 20:
        parser.error(f"--repeats {arguments.repeats} is too few for a median: at least 20")
    torch.set_num_threads(THREADS)
    result: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": THREADS,
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "repeats": arguments.repeats,
    }
    passed = True
    for name, measure in (("prefill", prefill), ("decode", decode)):
        medians = measure(arguments.repeats)
        within = medians["total"] <= TARGET_MS[name]
        result[name] = {"median_ms": medians, "target_ms": TARGET_MS[name], "pass": within}
        passed &= within
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
