"""One IndexShare group of GLM-5.3 at true size over several GPUs, against the same code on one of them.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.layer_scaling --splits tp=2 pcp=2,ep=2 pcp=2,dcp=2,ep=2 \
        --lengths 8192,32768,131072,262144 --out benchmarks/results/layer_scaling.json

Every split prefills the same prompts in the same chunks, with the same random weights: one seed is one model at every
split. First each GPU runs the whole group alone; its time is the one that speed-ups are of.

Outputs are compared row by row. At this size a product of another shape adds in another order, which flips near-ties of
the indexer and the router, so a row may differ by much while nothing is wrong. What one GPU makes of the same prompt in
other chunks differs by the same cause: that is the yardstick, and a split agrees if its rows are as near to one GPU's
as that, within a factor of two.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cptools import ParallelConfig, ParallelGroups, init_world
from examples.world import device_type
from models.glm53 import GLM53, GLM53Config
from models.glm53.step import StepResult
from models.glm53.weights import random_weights

GROUP_OF_LAYER = 6
REPEATS = 3
COMPARED_TOKENS = 8192
FAR = 0.05
"""Relative difference from which a row counts as far."""


@dataclass(frozen=True)
class Setting:
    """What all splits have in common."""

    config: GLM53Config
    device: torch.device
    dtype: torch.dtype
    keep_fp8: bool
    kv_rows: Literal["fp32", "bf16", "fp8"]
    chunk: int

    def model(self, groups: ParallelGroups | None) -> GLM53:
        return GLM53.over(
            groups,
            self.config,
            lambda part: random_weights(
                self.config, device=self.device, dtype=self.dtype, keep_fp8=self.keep_fp8, split=part
            ),
            kv_rows=self.kv_rows,
        )

    def prompt(self, length: int) -> list[int]:
        return torch.randint(
            self.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()


@dataclass(frozen=True)
class Difference:
    """Between the rows of two runs, relative to the norm of a row."""

    median: float
    far: float
    """Share of the rows that differ by FAR or more."""

    @classmethod
    def between(cls, a: Tensor, b: Tensor) -> Difference:
        relative = (a - b).norm(dim=1) / b.norm(dim=1)
        return cls(relative.median().item(), (relative >= FAR).float().mean().item())

    def within(self, other: Difference, factor: float) -> bool:
        """Not much farther than another; a NaN never is."""
        floor = 1e-6
        return self.median <= factor * max(other.median, floor) and self.far <= factor * other.far + 1e-3


def prefill(model: GLM53, prompt: Sequence[int], chunk: int) -> Iterator[StepResult]:
    """The steps of a prompt through the group."""
    cache = model.new_cache(model.kv.layout.pages(len(prompt)))
    request = cache.open()
    for start in range(0, len(prompt), chunk):
        yield model.step(cache, prompts={request: prompt[start : start + chunk]})


def outputs(model: GLM53, prompt: Sequence[int], chunk: int) -> Tensor:
    """Hidden states of a prompt, float32 on the CPU, the same on all ranks."""
    steps = prefill(model, prompt, chunk)
    return torch.cat([model.cp.unshard(step.hidden, step.plan.prompt).float().cpu() for step in steps])


def seconds(model: GLM53, setting: Setting, length: int) -> list[float]:
    """Of whole prefills, from a barrier to the end on the slowest rank, the same on all ranks."""
    times = []
    prompt = setting.prompt(length)
    for _ in range(REPEATS):
        _synchronize(setting.device)
        dist.barrier()
        start = time.perf_counter()
        for _ in prefill(model, prompt, setting.chunk):
            pass
        _synchronize(setting.device)
        own = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=setting.device)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        times.append(own.item())
    return times


def measure(
    setting: Setting, splits: Sequence[ParallelConfig], lengths: Sequence[int], timeout: timedelta
) -> list[dict[str, object]]:
    """All splits at all lengths: the same rows on every rank. Collective over the default group."""
    compared = setting.prompt(min(COMPARED_TOKENS, max(lengths)))
    alone = setting.model(None)
    reference = outputs(alone, compared, setting.chunk)
    yardstick = Difference.between(outputs(alone, compared, math.ceil(len(compared) * 3 / 8)), reference)
    base = {length: seconds(alone, setting, length) for length in lengths}
    del alone
    rows = [_row("one GPU", length, base[length], base[length]) for length in lengths]
    rows[0] |= {"median_difference": yardstick.median, "far_rows": yardstick.far, "compared": "with other chunks"}
    for sizes in splits:
        with ParallelGroups.from_world(sizes, timeout=timeout) as groups:
            model = setting.model(groups)
            found = Difference.between(outputs(model, compared, setting.chunk), reference)
            for length in lengths:
                row = _row(name(sizes), length, seconds(model, setting, length), base[length])
                row |= {"median_difference": found.median, "far_rows": found.far}
                rows.append({**row, "agrees": found.within(yardstick, 2.0)})
            del model
    return rows


def _row(split: str, length: int, times: Sequence[float], base: Sequence[float]) -> dict[str, object]:
    median = statistics.median(times)
    return {
        "split": split,
        "tokens": length,
        "seconds": median,
        "spread_s": max(times) - min(times),
        "speed_up": statistics.median(base) / median,
    }


def name(sizes: ParallelConfig) -> str:
    given = {"pcp": sizes.pcp, "dcp": sizes.dcp, "tp": sizes.tp, "ep": sizes.ep, "dp": sizes.dp}
    return " x ".join(f"{axis.upper()}{size}" for axis, size in given.items() if size > 1) or "one GPU"


def sizes_of(text: str) -> ParallelConfig:
    """Of "pcp=2,ep=2"; ValueError names what is wrong."""
    try:
        return ParallelConfig(**{axis: int(size) for axis, size in (item.split("=") for item in text.split(","))})
    except TypeError as error:
        raise ValueError(f"--splits {text!r}: {error}") from error


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--splits", nargs="+", default=["tp=2", "pcp=2", "pcp=2,ep=2", "pcp=2,dcp=2,ep=2"])
    parser.add_argument("--lengths", default="8192,32768,131072,262144")
    parser.add_argument("--chunk", type=int, default=16_384, help="prompt tokens of a step, over all ranks")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a rank waits for another")
    parser.add_argument("--out", type=Path, help="rank 0 writes the JSON there")
    args = parser.parse_args(argv)
    splits = [sizes_of(text) for text in args.splits]
    whole = GLM53Config.glm53()
    config = whole.excerpt(whole.indexer_group(GROUP_OF_LAYER), experts=args.experts)
    timeout = timedelta(seconds=args.timeout)
    with init_world(device_type("cuda"), timeout=timeout) as device:
        setting = Setting(config, torch.device(device), torch.bfloat16, True, "fp8", args.chunk)
        rows = measure(setting, splits, [int(length) for length in args.lengths.split(",")], timeout)
    if os.environ["RANK"] != "0":
        return 0
    about = {
        "date": datetime.date.today().isoformat(),
        "gpu": f"{os.environ['WORLD_SIZE']} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "chunk": args.chunk,
    }
    print(about)
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if args.out is not None:
        args.out.write_text("[\n" + ",\n".join(json.dumps({**row, **about}) for row in rows) + "\n]\n")
    return 0 if all(row.get("agrees", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
