"""One IndexShare group of GLM-5.3 at true size on one GPU, part by part, against the floor of each part.

    python -m benchmarks.layers [--out benchmarks/results/layers.json] [--experts 256] [--prefill-only | --decode-only]

The group is one layer with an indexer and the three that share its selection, 39.5 GB of block-FP8 weights, FP8 cache
rows. Prefill: chunks of 2K and 8K behind contexts of 0 to 1M tokens, run eagerly with the GPU held back until the host
has launched everything, so that the figures are the GPU's; the eager time, host included, stands beside them. Decode:
batches of 1 to 128 requests, one CUDA graph of the whole group, parts from event nodes in the graph.

Weights, tokens and cached rows are random: routing is close to uniform and the selected keys lie anywhere, which is
about the worst case for the experts' and the cache's locality.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_timing import graph_time_us
from benchmarks.layer_floors import PARTS, Work, part_floors
from benchmarks.span_timer import SpanTimer
from cptools import LoadBalancedCPShard, RoundRobinKVShard
from cptools.spans import no_span
from cptools.step_rows import DecodeRows
from models.glm53 import GLM53, GLM53Config
from models.glm53.step import EngineCache
from models.glm53.weights import random_weights

GROUP_OF_LAYER = 6
PREFILL_CHUNKS = (2048, 8192)
PREFILL_CONTEXTS = (0, 8192, 65_536, 253_952, 1_048_576 - 8192)
DECODE_BATCHES = (1, 8, 32, 128)
DECODE_CONTEXTS = (8192, 65_536)
LONG_DECODE = (1, 1_048_576 - 64)
REPEATS = 5
HOLD_BYTES, HOLD_FILLS = 1 << 30, 60
"""The GPU fills memory before a step, about 20 ms, while the host launches it."""
PAGE_SIZE = 64


def build(config: GLM53Config, tokens: int, seed: int = 0) -> tuple[GLM53, EngineCache]:
    """A model of random weights and a cache of ``tokens`` tokens whose every row holds random, valid values."""
    weights = random_weights(config, device="cuda", dtype=torch.bfloat16, keep_fp8=True, seed=seed)
    model = GLM53(
        config,
        weights,
        cp=LoadBalancedCPShard(world_size=1, rank=0),
        kv=RoundRobinKVShard(world_size=1, rank=0, page_size=PAGE_SIZE),
        kv_rows="fp8",
    )
    cache = model.new_cache(model.kv.layout.pages(tokens))
    fill_cache(cache)
    return model, cache


def fill_cache(cache: EngineCache) -> None:
    """Random rows in every page, normed latents and layer-normed keys having unit variance."""
    generator = torch.Generator("cuda").manual_seed(1)
    for pages, widths in ((cache.kv.mla_rows, (cache.kv.mla.latent, cache.kv.mla.rope)), (cache.kv.index_rows, None)):
        layers, count, _ = pages.pages.shape
        for first in range(0, count * PAGE_SIZE, 1 << 17):
            slots = torch.arange(first, min(first + (1 << 17), count * PAGE_SIZE), device="cuda")
            dims = widths or (cache.kv.index.dim,)
            parts = [
                torch.randn(len(slots), dim, device="cuda", dtype=torch.bfloat16, generator=generator) for dim in dims
            ]
            rows = cache.kv.mla.pack(*parts) if widths else cache.kv.index.pack(*parts)
            for layer in range(layers):
                pages.store(layer, slots, rows)


def open_at(cache: EngineCache, lengths: Sequence[int]) -> list[int]:
    """Requests that hold so many tokens already; what their rows hold is what the pages hold."""
    requests = [cache.open() for _ in lengths]
    cache.tables.reserve(dict(zip(requests, lengths, strict=True)))
    cache.lengths.update(zip(requests, lengths, strict=True))
    return requests


def parts_of(times: Mapping[str, float], layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """(microseconds by part of the full layer, of a shared one on average) out of times by path."""
    full: dict[str, float] = defaultdict(float)
    shared: dict[str, float] = defaultdict(float)
    for path, value in times.items():
        layer, _, part = path.partition("/")
        number = int(layer.split()[-1])
        target, weight = (full, 1) if number == 0 else (shared, layers - 1)
        target[part or "layer"] += value / weight
    return dict(full), dict(shared)


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def measure_prefill(model: GLM53, cache: EngineCache, chunk: int, context: int) -> dict[str, object]:
    """Parts of one chunk of one request behind ``context`` cached tokens."""
    generator = torch.Generator().manual_seed(chunk + context)
    samples, eager = [], []
    scratch = torch.empty(HOLD_BYTES, dtype=torch.uint8, device="cuda")
    held = SpanTimer(hold=lambda: [scratch.fill_(i) for i in range(HOLD_FILLS)])
    for timer in [None, *[held, None] * REPEATS]:
        (request,) = open_at(cache, [context])
        ids = torch.randint(model.config.vocab_size, (chunk,), generator=generator).tolist()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        model.span = no_span if timer is None else timer
        torch.cuda.synchronize()
        start.record()
        model.step(cache, prompts={request: ids})
        stop.record()
        torch.cuda.synchronize()
        if timer is None:
            eager.append(1e3 * start.elapsed_time(stop))
        else:
            samples.append(dict(timer.times_us()))
            timer.clear()
        cache.close(request)
    model.span = no_span
    times = medians(samples)
    full, shared = parts_of(times, len(model.weights.layers))
    work = Work(chunk, context)
    return {
        "phase": "prefill",
        "rows": chunk,
        "context": context,
        "group_us": sum(value for path, value in times.items() if "/" not in path),
        "eager_us": statistics.median(eager[1:]),
        **_against_floor(model.config, work, full, shared),
    }


def measure_decode(model: GLM53, cache: EngineCache, batch: int, context: int) -> dict[str, object]:
    """Parts of one decode step of ``batch`` requests with ``context`` cached tokens each, in a CUDA graph."""
    requests = open_at(cache, [context + 1] * batch)
    tables = cache.tables.table(requests).to("cuda")
    lens = torch.full((batch,), context, dtype=torch.int64, device="cuda")
    ids = torch.randint(model.config.vocab_size, (batch,), device="cuda")

    def step() -> None:
        rows = DecodeRows.of_buffers(model.kv, lens, tables, per_request=1)
        model.decode_hidden(cache.kv, rows, ids)

    (plain,) = graph_time_us(step, launches=1, rounds=1)
    timer = SpanTimer(graph=True)
    model.span = timer
    graph = _capture(step)
    model.span = no_span
    samples = []
    for _ in range(REPEATS):
        graph.replay()
        samples.append(dict(timer.times_us()))
    times = medians(samples)
    full, shared = parts_of(times, len(model.weights.layers))
    for request in requests:
        cache.close(request)
    work = Work(batch, context, requests=batch, prompt=False)
    return {
        "phase": "decode",
        "rows": batch,
        "context": context,
        "group_us": sum(value for path, value in times.items() if "/" not in path),
        "graph_us": plain,
        **_against_floor(model.config, work, full, shared),
    }


def _against_floor(
    config: GLM53Config, work: Work, full: Mapping[str, float], shared: Mapping[str, float]
) -> dict[str, object]:
    floors = [part_floors(config, work, full=kind) for kind in (True, False)]
    return {
        "full_us": {part: full.get(part, 0.0) for part in PARTS},
        "shared_us": {part: shared.get(part, 0.0) for part in PARTS},
        "full_floor_us": dict(floors[0]),
        "shared_floor_us": dict(floors[1]),
    }


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def line(row: Mapping[str, object]) -> str:
    """One measurement, microseconds of each part and its ratio to the floor, full layer then shared."""
    text = f"{row['phase']:<8}{row['rows']:>6}{row['context']:>9}  group {row['group_us']:>9.0f}"
    for kind in ("full", "shared"):
        times, floors = row[f"{kind}_us"], row[f"{kind}_floor_us"]
        parts = [
            f"{part} {times[part]:.0f}" + (f" ({times[part] / floors[part]:.1f}x)" if floors[part] else "")  # type: ignore[index]
            for part in PARTS
        ]
        text += f"\n    {kind:<7}" + "  ".join(parts)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="write the JSON there")
    parser.add_argument("--experts", type=int, default=256, help="routed experts a layer")
    parser.add_argument("--max-context", type=int, default=1 << 20, help="leave longer contexts out")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--prefill-only", action="store_true")
    kinds.add_argument("--decode-only", action="store_true")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("layers are measured on a GPU, and there is none")
    whole = GLM53Config.glm53()
    config = whole.excerpt(whole.indexer_group(GROUP_OF_LAYER), experts=args.experts)
    prefill = [(chunk, c) for chunk in PREFILL_CHUNKS for c in PREFILL_CONTEXTS if c + chunk <= args.max_context]
    decode = [(batch, c) for batch in DECODE_BATCHES for c in DECODE_CONTEXTS] + [LONG_DECODE]
    decode = [(batch, c) for batch, c in decode if c < args.max_context]
    tokens = max(
        [c + chunk for chunk, c in prefill] + [batch * (c + PAGE_SIZE) for batch, c in decode if not args.prefill_only]
    )
    model, cache = build(config, tokens)
    about = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "layers": len(config.indexer_types),
        "experts": config.n_routed_experts,
        "weights_gb": torch.cuda.memory_allocated() / 1e9,
    }
    print(about, flush=True)
    shapes = [(measure_prefill, *shape) for shape in prefill if not args.decode_only]
    shapes += [(measure_decode, *shape) for shape in decode if not args.prefill_only]
    rows: list[dict[str, object]] = []
    for measure, queries, context in shapes:
        rows.append(measure(model, cache, queries, context))
        print(line(rows[-1]), flush=True)
        if args.out is not None:
            # Again after each shape, so that a run cut short keeps what it has.
            args.out.write_text("[\n" + ",\n".join(json.dumps({**row, **about}) for row in rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
