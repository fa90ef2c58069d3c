"""Host time of the router for one request of 1M tokens against 8 engines.

    python benchmarks/router_speed.py [--repeats 30] [--out benchmarks/results/router_speed.json]

Blocks of 512 tokens (2,048 a prompt) and of 64 (16,384). Engine k holds k/8 of the prompt on the GPU, reported as
chunked prefill does, 128 blocks an event, all of it in host memory, and 100,000 blocks of other prompts. 200 dispatches
are believed that no event confirmed yet. "lookup" is the index alone; "route" the whole decision; "stored" one event of
128 new blocks; "lost" forgetting an engine; "table" what a dict from hash to mask of engines takes for the lookup.
Every repetition looks up hash objects of its own, as they come from hashing a prompt. Medians; the exit code says
whether a decision is within its target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

from benchmarks.plan_speed import cpu_name
from serving.core.kv_events import Tier
from serving.core.route_choice import RoutePolicy, RouteRequest
from serving.core.route_cost import EngineProfile, PrefillCost
from serving.core.router import Router

ENGINES = 8
PROMPT_TOKENS = 1_048_576
OTHER_BLOCKS = 100_000
CHUNK_BLOCKS = 128
TARGET_MS = 2.0


def filled(chain: list[bytes], block_tokens: int, rng: random.Random) -> Router:
    cost = PrefillCost(1 / 15_000, 1 / 6e9)
    profiles = [EngineProfile(f"engine{i}", prefill=cost, host_bytes_per_second=5e10) for i in range(ENGINES)]
    router = Router(profiles, time.monotonic, RoutePolicy(block_tokens), speculation_seconds=1e9)
    for i, name in enumerate(router.events):
        for _ in range(0, OTHER_BLOCKS, 1000):
            router.index.store(name, Tier.GPU, [rng.randbytes(32) for _ in range(1000)])
        for start in range(0, len(chain) * (i + 1) // ENGINES, CHUNK_BLOCKS):
            parent = chain[start - 1] if start else None
            router.index.store(name, Tier.GPU, chain[start : start + CHUNK_BLOCKS], parent=parent)
        router.index.store(name, Tier.HOST, chain)
    for i in range(200):
        router.speculation.add(i, f"engine{i % ENGINES}", chain[: rng.randrange(len(chain))])
    return router


def measure(block_tokens: int, repeats: int) -> dict[str, float]:
    rng = random.Random(0)
    chain = [rng.randbytes(32) for _ in range(PROMPT_TOKENS // block_tokens)]
    router = filled(chain, block_tokens, rng)
    masks = {rng.randbytes(32): 1 for _ in range(ENGINES * OTHER_BLOCKS)} | dict.fromkeys(chain, 2 * ENGINES - 1)
    times: dict[str, list[float]] = {}

    def clock(name: str, start: float) -> None:
        times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    for i in range(repeats):
        prompt = [bytes(bytearray(block)) for block in chain]
        start = time.perf_counter()
        router.index.lookup(prompt)
        clock("lookup", start)
        prompt = [bytes(bytearray(block)) for block in chain]
        start = time.perf_counter()
        router.route(RouteRequest(str(i), PROMPT_TOKENS, prompt))
        clock("route", start)
        prompt = [bytes(bytearray(block)) for block in chain]
        start = time.perf_counter()
        alive = -1
        for block in prompt:
            alive &= masks.get(block, 0)
            if not alive:
                break
        clock("table", start)
        new = [rng.randbytes(32) for _ in range(CHUNK_BLOCKS)]
        start = time.perf_counter()
        router.index.store("engine0", Tier.GPU, new, parent=chain[-1])
        clock("stored", start)
    start = time.perf_counter()
    router.lost("engine0")
    clock("lost", start)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="runs of each, at least 20")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    arguments = parser.parse_args()
    if arguments.repeats < 20:
        parser.error(f"--repeats {arguments.repeats} is too few for a median: at least 20")
    result: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "repeats": arguments.repeats,
        "engines": ENGINES,
        "target_ms": TARGET_MS,
    }
    passed = True
    for block_tokens in (512, 64):
        medians = measure(block_tokens, arguments.repeats)
        result[f"{PROMPT_TOKENS // block_tokens} blocks"] = medians
        passed &= medians["route"] <= TARGET_MS
    result["pass"] = passed
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
