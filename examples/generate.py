"""Continue prompts with a checkpoint that is read in parts: each rank takes what it keeps, straight to its device.

    torchrun --nproc-per-node 8 examples/generate.py --checkpoint DIR --pcp 8 --dcp 8 --ep 8 --kv-rows fp8 \\
        --keep-fp8 --dtype bfloat16 --prompts FILE.json --max-new-tokens 64

Prompts are token ids. The result is one line of ids a prompt, the same on every rank; before them stands what each rank
read and holds. Replicas (--dp) all run the same prompts. With --random-weights DIR needs no more than config.json:
weights are drawn where they would be read, which shows whether a model fits before its checkpoint is there. With --json
the last line is one JSON object. One rank needs no torchrun.

A rank's exit status: 0, 1 failed, 2 refused flags, prompts or checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cptools import ParallelConfig, ParallelGroups, init_world
from examples.prompts import check_prompts, random_prompts, read_prompts
from examples.world import FlagParser, check_draft_tokens, check_world, device_type, join_torchrun, refuse
from models.glm53 import GLM53, GLM53Config
from models.glm53.weight_split import WeightSplit, check_split
from models.glm53.weights import ModelWeights, load_weights, progress_bar, random_weights, weight_bytes

GIB = 2**30


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, and the seconds that it took to make its weights."""

    weights: int
    """By the arithmetic of the split, if the checkpoint is the released one."""
    device_peak: int
    """Of the whole run; 0 on a CPU."""
    host_peak: int
    read_s: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--pcp", type=int, default=1, metavar="W", help="ranks that split the queries of a prompt")
    parser.add_argument("--dcp", type=int, default=1, metavar="N", help="ranks that split one copy of the KV")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split the heads")
    parser.add_argument("--ep", type=int, default=1, help="ranks that split the experts: 1 or all")
    parser.add_argument("--dp", type=int, default=1, help="replicas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--keep-fp8", action="store_true", help="block-FP8 matrices stay FP8")
    parser.add_argument("--random-weights", action="store_true", help="draw the weights, read only config.json")
    parser.add_argument("--kv-rows", choices=("fp32", "bf16", "fp8"), default="fp32")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", type=Path, metavar="FILE.json", help="a list of lists of token ids")
    prompts.add_argument("--random", type=int, metavar="n", help="one prompt of n random ids")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--draft-tokens", type=int, default=0, metavar="k", help="of the MTP layer, a token (none)")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a request in one step")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if every rank has a GPU")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a rank waits for another")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args(argv)
    parser.require(args, positive=("random", "max_new_tokens", "chunk", "timeout"), or_zero=("draft_tokens",))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    join_torchrun()
    args = parse(argv)
    try:
        device = device_type(args.device)
        sizes = ParallelConfig(pcp=args.pcp, dcp=args.dcp, tp=args.tp, ep=args.ep, dp=args.dp)
        check_world(sizes)
        config = GLM53Config.from_pretrained(args.checkpoint)
        split = WeightSplit.of(sizes, sizes.rank_coords(int(os.environ["RANK"])))
        check_split(config, split)
        check_draft_tokens(args.draft_tokens, config)
        prompts = read_prompts(args.prompts) if args.prompts else random_prompts([args.random], config)
        check_prompts(prompts, config, new_positions=args.max_new_tokens - 1)
    except (ValueError, OSError) as error:
        refuse(error)
    timeout = timedelta(seconds=args.timeout)
    dtype = getattr(torch, args.dtype)
    with init_world(device, timeout=timeout) as own, ParallelGroups.from_world(sizes, timeout=timeout) as groups:
        first = dist.get_rank() == 0
        start = time.monotonic()
        with progress_bar("rank 0 reads") if first else nullcontext() as progress:

            def weights(part: WeightSplit) -> ModelWeights:
                if args.random_weights:
                    return random_weights(config, device=own, dtype=dtype, keep_fp8=args.keep_fp8, split=part)
                return load_weights(
                    args.checkpoint,
                    config,
                    device=own,
                    dtype=dtype,
                    keep_fp8=args.keep_fp8,
                    split=part,
                    progress=progress,
                )

            try:
                model = GLM53.over(groups, config, weights, kv_rows=args.kv_rows)
            except (ValueError, OSError) as error:
                refuse(error)
        read_s = time.monotonic() - start
        out = model.generate_batch(
            prompts, args.max_new_tokens, chunk=args.chunk, stop_at_eos=True, draft_tokens=args.draft_tokens
        )
        memory = RankMemory(
            weights=weight_bytes(config, dtype=dtype, keep_fp8=args.keep_fp8, split=split),
            device_peak=torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            read_s=read_s,
        )
        gathered: list[RankMemory | None] = [None] * dist.get_world_size()
        dist.gather_object(memory, gathered if first else None)
    if first:
        report([each for each in gathered if each is not None], out.ids, as_json=args.json)
    return 0


def report(ranks: Sequence[RankMemory], ids: Sequence[Sequence[int]], *, as_json: bool) -> None:
    print("rank   weights GiB   device peak GiB   host peak GiB   read in s")
    for rank, memory in enumerate(ranks):
        print(
            f"{rank:<4}{memory.weights / GIB:>14.2f}{memory.device_peak / GIB:>18.2f}"
            f"{memory.host_peak / GIB:>16.2f}{memory.read_s:>12.1f}"
        )
    for prompt, new in enumerate(ids):
        print(f"prompt {prompt}: {list(new)}")
    if as_json:
        print(json.dumps({"ids": [list(new) for new in ids], "ranks": [asdict(memory) for memory in ranks]}))


if __name__ == "__main__":
    sys.exit(main())
