"""A long real text over several ranks: prefill in chunks with PCP x DCP, then decode with DCP, equal to one rank.

    torchrun --standalone --nproc-per-node 2 examples/long_prefill.py

The checkpoint is made on the spot: a small GLM-5.3 with random weights, so what it writes is noise. Every number of it
is compared: the logits of all prompt positions, of all decode steps, and the ids; bit by bit on CPUs, which is how the
reference kernels are made. GPUs sum in another order for other shapes: say --atol there. With --sabotage one module is
replaced by a broken one, and the comparison says `no`. A rank's exit status: 0 equal, 1 not equal or failed, 2 refused
flags. torchrun exits 1 for any but 0, and ends with a report that names the status and the reason of a refusal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cptools import ParallelConfig, ParallelGroups, init_world
from cptools.cp_kv import TrafficCounters
from cptools.step_plan import StepPlan
from examples.demo_model import CONFIG, as_text, save_demo_checkpoint, standard_library_prompt
from examples.sabotage import KINDS, check_sabotage, sabotage
from examples.world import FlagParser, check_world, device_type, join_torchrun, refuse
from models.glm53 import GLM53

MIB = 2**20


@dataclass
class Run:
    """What generating from the prompt made, and what it took on this rank."""

    ids: list[int]
    logits: torch.Tensor
    decode_logits: torch.Tensor
    traffic: TrafficCounters
    rows: int
    pairs: int
    prefill_s: float
    decode_s: float


class Clock:
    """The model's progress: counts rows and causal work of this rank, takes times, and speaks if asked to."""

    def __init__(self, name: str, tokens: int, steps: int, *, speaks: bool) -> None:
        self.name, self.tokens, self.steps, self.speaks = name, tokens, steps, speaks
        self.start = time.perf_counter()
        self.prefill_s = self.seconds = 0.0
        self.rows = self.pairs = self.done = self.decoded = 0

    def __call__(self, step: StepPlan, gained: Sequence[int]) -> None:
        self.seconds = time.perf_counter() - self.start
        self.rows += step.prompt_rows
        self.pairs += step.prompt.pairs[step.prompt.rank]
        self.done += step.prompt.num_tokens
        self.decoded += step.decode_rows
        if step.prompt.num_tokens:
            self.prefill_s = self.seconds
            self._say(f"prefill {self.done:>7,} / {self.tokens:,} tokens")
        elif self.decoded % 8 == 0 or self.decoded == self.steps:
            self._say(f"decode  {self.decoded:>7,} / {self.steps} steps")

    def _say(self, what: str) -> None:
        if self.speaks:
            print(f"  {self.name}: {what:<36} {self.seconds:6.1f} s", flush=True)


def generate(model: GLM53, prompt: list[int], args: argparse.Namespace, name: str, *, speaks: bool) -> Run:
    clock = Clock(name, len(prompt), args.decode_steps, speaks=speaks)
    out = model.generate_batch([prompt], args.decode_steps + 1, chunk=args.chunk, prompt_logits="all", progress=clock)
    return Run(
        ids=out.ids[0],
        logits=out.prompt_logits[0],
        decode_logits=out.decode_logits[0],
        traffic=out.traffic,
        rows=clock.rows,
        pairs=clock.pairs,
        prefill_s=clock.prefill_s,
        decode_s=clock.seconds - clock.prefill_s,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    world = int(os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("--tokens", type=int, default=16_384, help="length of the prompt")
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a prefill step")
    parser.add_argument("--decode-steps", type=int, default=24)
    parser.add_argument("--pcp", type=int, default=world, help="ranks that split the queries (all)")
    parser.add_argument("--dcp", type=int, default=world, help="ranks that split the KV (all)")
    parser.add_argument("--kv-rows", choices=("fp32", "bf16", "fp8"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if every rank has a GPU")
    parser.add_argument("--atol", type=float, default=0.0, help="largest difference of logits that counts as equal")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a rank waits for another")
    parser.add_argument("--sabotage", choices=KINDS, help="run with a broken module")
    args = parser.parse_args(argv)
    parser.require(args, positive=("chunk", "decode_steps", "timeout"), or_zero=("atol",))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    join_torchrun()
    args = parse(argv)
    try:
        device = device_type(args.device)
        sizes = ParallelConfig(pcp=args.pcp, dcp=args.dcp)
        prompt = standard_library_prompt(args.tokens)
        positions = args.tokens + args.decode_steps
        if positions > CONFIG.max_position_embeddings:
            raise ValueError(f"{positions} positions are needed, the model has {CONFIG.max_position_embeddings}")
        if args.sabotage:
            check_sabotage(args.sabotage, pcp=args.pcp, dcp=args.dcp, tokens=args.tokens, chunk=args.chunk)
        check_world(sizes)
    except ValueError as error:
        refuse(error)
    with tempfile.TemporaryDirectory() as folder:
        # Every rank writes its own: ranks need not share a file system.
        save_demo_checkpoint(Path(folder))
        rank, equal = int(os.environ["RANK"]), True
        if rank == 0:
            introduce(args, sizes, device)
        runs = run_parallel(Path(folder), prompt, sizes, args, device)
        if rank == 0:
            equal = compare(Path(folder), prompt, runs, args, device)
    return 0 if equal else 1


def introduce(args: argparse.Namespace, sizes: ParallelConfig, device: str) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    full, moe = CONFIG.indexer_types.count("full"), CONFIG.mlp_layer_types.count("sparse")
    print(f"prompt: {args.tokens:,} tokens, the bytes of the standard library of Python {version}")
    print(
        f"model:  {CONFIG.num_hidden_layers} layers, {full} with an indexer of their own (top-{CONFIG.index_topk}), "
        f"{moe} with {CONFIG.n_routed_experts} experts; random weights"
    )
    print(
        f"ranks:  {sizes.world_size} on {device}, PCP {sizes.pcp} x DCP {sizes.dcp}, chunks of {args.chunk:,}, "
        f"{args.kv_rows} rows" + (f", sabotage: {args.sabotage}" if args.sabotage else ""),
        flush=True,
    )


def run_parallel(
    checkpoint: Path, prompt: list[int], sizes: ParallelConfig, args: argparse.Namespace, device: str
) -> list[Run]:
    """The run over all ranks; returns every rank's on rank 0, on others only their own."""
    timeout = timedelta(seconds=args.timeout)
    with init_world(device, timeout=timeout) as own, ParallelGroups.from_world(sizes, timeout=timeout) as groups:
        model = GLM53.from_pretrained(checkpoint, device=own, parallel=groups, kv_rows=args.kv_rows)
        if args.sabotage:
            sabotage(model, args.sabotage, chunk=args.chunk)
        name = f"{dist.get_world_size()} ranks"
        run = generate(model, prompt, args, name, speaks=dist.get_rank() == 0)
        run.logits, run.decode_logits = run.logits.cpu(), run.decode_logits.cpu()
        gathered: list[Run | None] = [None] * dist.get_world_size()
        dist.gather_object(run, gathered if dist.get_rank() == 0 else None)
    return [each for each in gathered if each is not None] or [run]


def compare(checkpoint: Path, prompt: list[int], runs: list[Run], args: argparse.Namespace, device: str) -> bool:
    """The same on this rank alone, decode attention summed in as many parts as there were DCP ranks; report both."""
    model = GLM53.from_pretrained(checkpoint, device=device, kv_rows=args.kv_rows, decode_parts=args.dcp)
    # In one piece: the chunks of the parallel run must not show in its result.
    print(f"  1 rank : {len(prompt):,} tokens in one piece", flush=True)
    alone = generate(model, prompt, argparse.Namespace(**{**vars(args), "chunk": None}), "1 rank ", speaks=True)
    alone.logits, alone.decode_logits = alone.logits.cpu(), alone.decode_logits.cpu()
    print("\n             prompt rows     causal pairs   KV rows      KV MiB   received MiB: new rows   contexts")
    for name, run in [*((f"rank {i}", run) for i, run in enumerate(runs)), ("one rank", alone)]:
        t = run.traffic
        print(
            f"{name:<12}{run.rows:>12,}{run.pairs:>17,}{t.rows_stored:>10,}{t.bytes_stored / MIB:>12.2f}"
            f"{t.new_row_bytes / MIB:>25.2f}{t.context_bytes / MIB:>11.2f}"
        )
    steps = args.decode_steps
    for name, run in ((f"{len(runs)} ranks", runs[0]), ("one rank", alone)):
        print(f"{name:<12}prefill {run.prefill_s:6.1f} s, decode {1e3 * run.decode_s / steps:6.1f} ms a step")
    print(f"generated:  {runs[0].ids}\nas bytes:   {as_text(runs[0].ids)}")
    same = [
        agree("prompt logits", [run.logits for run in runs], alone.logits, args.atol),
        agree("decode logits", [run.decode_logits for run in runs], alone.decode_logits, args.atol),
        agree("ids", [torch.tensor(run.ids) for run in runs], torch.tensor(alone.ids), 0),
    ]
    within = f", within {args.atol:g}" if args.atol else ""
    print(f"equal to one rank: {f'yes{within}' if all(same) else 'no'}", flush=True)
    return all(same)


def agree(what: str, ranks: list[torch.Tensor], alone: torch.Tensor, atol: float) -> bool:
    """Whether every rank has what one rank has; says so, and else in how many rows they differ and by how much."""
    if all(torch.equal(each, alone) for each in ranks):
        print(f"{what}: equal")
        return True
    worst = torch.stack([(each - alone).abs().double().view(len(alone), -1).amax(1) for each in ranks]).amax(0)
    largest = float(worst.max())
    size = f", by up to {largest:.3g}" if alone.is_floating_point() else ""
    print(f"{what}: {int((worst != 0).sum()):,} of {len(alone):,} differ{size}")
    return largest <= atol


if __name__ == "__main__":
    sys.exit(main())
