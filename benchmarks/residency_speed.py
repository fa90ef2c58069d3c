"""Host time of `cptools.residency`: a pass before a step, and the commits after it, in one thread of Python.

    python benchmarks/residency_speed.py [--out benchmarks/results/residency_speed.json]

"decode, resident": 256 requests with contexts of 1K to 128K tokens on a GPU that holds them all, 1 + 3 draft rows
each a step, 3 of them accepted. "decode, spilled": the same requests on a GPU with pages for 40 % of their rows, so
that most have hot regions. "prompt": a prompt of 2^20 tokens in chunks of 8192 through 1,024 GPU pages, where rows
leave as they come. "decode, 2^20 tokens": that request after its prompt. "admission": a request of 2^20 tokens behind
a kept prefix of 16,000 blocks in host memory. Pages of 64 rows, one rank; copies are over at once. Milliseconds:
median, largest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cptools import KVLayout
from cptools.residency import CopyDone, Residency, ResidencyPlan, ResidencySizes

MOST = 2**20
CHUNK = 8192


def sizes(gpu_pages: int, pages: int) -> ResidencySizes:
    return ResidencySizes(
        layout=KVLayout(1),
        gpu_pages=gpu_pages,
        index_pages=pages,
        host_pages=pages,
        max_tokens=MOST + 1024,
        max_step_tokens=CHUNK,
        query_rows=4,
        watermark=256,
    )


class Engine:
    """Passes and commits, timed."""

    def __init__(self, sizes: ResidencySizes) -> None:
        self.residency = Residency(sizes)
        self.times: list[float] = []

    def step(self, wants: dict[int, int], accepted: int | None = None) -> ResidencyPlan:
        start = time.perf_counter()
        plan = self.residency.schedule(wants)
        for request in plan.granted:
            self.residency.commit(request, wants[request], accepted)
        self.times.append((time.perf_counter() - start) * 1e3)
        for copy in plan.copies:
            self.residency.completed(CopyDone(copy.copy, 0))
        return plan

    def prefill(self, request: int, tokens: int) -> None:
        while left := tokens - self.residency.tokens(request):
            self.step({request: min(CHUNK, left)} if request in self.residency.running else {})

    def measured(self) -> dict[str, float | int]:
        times, self.times = self.times, []
        return {
            "passes": len(times),
            "median_ms": round(statistics.median(times), 3),
            "max_ms": round(max(times), 3),
        }


def decode(gpu_share: float, steps: int) -> dict[str, float | int]:
    contexts = np.random.default_rng(0).integers(1024, 131_072, 256).tolist()
    pages = sum(-(-tokens // 64) + 20 for tokens in contexts)
    engine = Engine(sizes(int(pages * gpu_share), 2 * pages + MOST // 64))
    requests = []
    for tokens in contexts:
        requests.append(engine.residency.add(tokens))
        engine.prefill(requests[-1], tokens)
    engine.times.clear()
    for _ in range(steps):
        engine.step({request: 4 for request in requests}, 3)
    hot = sum(bool(engine.residency.places(request).hot_pages) for request in requests)
    return engine.measured() | {"requests_with_a_hot_region": hot}


def long_request(steps: int) -> dict[str, dict[str, float | int]]:
    engine = Engine(sizes(1024, 2 * MOST // 64 + 64))
    request = engine.residency.add(MOST)
    engine.prefill(request, MOST)
    made = {"prompt": engine.measured()}
    for _ in range(steps):
        engine.step({request: 4}, 3)
    made["decode, 2^20 tokens"] = engine.measured()
    prefix = engine.residency.finish(request, keep_blocks=16_000)
    engine.residency.add(MOST, shares=prefix, blocks=16_000)
    engine.step({})
    made["admission"] = engine.measured()
    return made


def cpu_name(lines: Iterable[str]) -> str:
    return next((line.partition(": ")[2].strip() for line in lines if line.startswith("model name")), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    info = Path("/proc/cpuinfo")
    report = {
        "date": str(datetime.date.today()),
        "cpu": cpu_name(info.read_text().splitlines()) if info.exists() else platform.processor(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "decode, resident": decode(1.1, options.steps),
        "decode, spilled": decode(0.4, options.steps),
        **long_request(options.steps),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
