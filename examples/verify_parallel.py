"""Several ranks against one: prefill and 16 decode steps of a checkpoint, compared number by number.

    torchrun --nproc-per-node 4 examples/verify_parallel.py --checkpoint DIR --pcp 4 --dcp 2 --json

All ranks run the prompts as one batch (with --alone each by itself too). Then the groups are closed and rank 0 runs the
batch on its own, in one piece, its decode attention summed in as many parts as there were DCP ranks. Ranks that split
heads (--tp) add in another order than one rank: give --atol 1e-4 or so, and fp32 rows, since FP8 rows round that to
other values. With --draft-tokens the ranks decode with drafts of the MTP layer, and rank 0 without. With --json the
last line is one JSON object, in which a difference that is NaN or infinite is null.

A rank's exit status: 0 equal, 1 not equal or failed, 2 refused flags, prompts or checkpoint. torchrun exits 1 for any
but 0, and ends with a report that names the status and the reason of a refusal. `python examples/demo_model.py DIR`
makes a small checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from cptools import ParallelConfig, ParallelGroups, init_world
from cptools.cp_kv import TrafficCounters
from cptools.step_plan import StepPlan
from examples.prompts import check_prompts, random_prompts, read_prompts
from examples.world import FlagParser, check_draft_tokens, check_world, device_type, join_torchrun, refuse
from models.glm53 import GLM53, GLM53Config

DECODE_STEPS = 16


@dataclass
class PromptResult:
    """What one prompt gave, on the CPU."""

    logits: Tensor
    """float32 [T, vocab] of the prompt's positions."""
    decode_logits: Tensor
    """float32 [DECODE_STEPS, vocab]."""
    generated: list[int]
    """The ids that the decode steps were fed, then the last one they gave."""
    topk: dict[int, Tensor]
    """Per layer int64 [T + DECODE_STEPS, K]: positions that each row attends to, ascending, then -1."""


@dataclass
class RankReport:
    """What a rank of the parallel run did."""

    prompt_rows: int
    traffic: TrafficCounters
    accepted: list[int]
    """Entry j: how many verifications accepted j drafts."""
    digest: str
    """Of all logits and ids: the same on every rank."""


class Selections:
    """Each layer's selection of every prompt, on all ranks: the model's observer and its progress, to be given as both.

    Collective over PCP, per layer.
    """

    def __init__(self, model: GLM53, prompts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.prompt_left = [len(prompt) for prompt in prompts]
        self.decode_left = [DECODE_STEPS] * len(prompts)
        self.positions = [len(prompt) + DECODE_STEPS for prompt in prompts]
        # By position, since the rows of rejected drafts are computed again with the tokens that took their place.
        self.rows: list[dict[int, dict[int, Tensor]]] = [defaultdict(dict) for _ in prompts]
        self.prompt_rows = 0

    def __call__(self, layer: int, step: StepPlan, prompt_topk: Tensor, decode_topk: Tensor) -> None:
        packed = self.model.cp.unshard(prompt_topk, step.prompt)
        parts = [*packed.split(list(step.prompt.query_lens)), *decode_topk.split(list(step.decode_query_lens))]
        starts = [*step.prompt.context_lens, *step.decode_context_lens]
        for prompt, start, part in zip([*self.prefilling, *self.decoding], starts, parts, strict=True):
            self.rows[prompt][layer].update(enumerate(part.cpu().clone(), start))

    def progress(self, step: StepPlan, gained: Sequence[int]) -> None:
        prefilling, decoding = self.prefilling, self.decoding
        self.prompt_rows += step.prompt_rows
        for i, rows in zip(prefilling, step.prompt.query_lens, strict=True):
            self.prompt_left[i] -= rows
        for i, tokens in zip(decoding, gained[len(prefilling) :], strict=True):
            self.decode_left[i] -= tokens

    @property
    def prefilling(self) -> list[int]:
        """A step holds the prompts not yet prefilled, then those not yet decoded, each in the order of the batch."""
        return [i for i, left in enumerate(self.prompt_left) if left]

    @property
    def decoding(self) -> list[int]:
        return [i for i, left in enumerate(self.decode_left) if left and not self.prompt_left[i]]

    def of(self, prompt: int) -> dict[int, Tensor]:
        return {
            layer: torch.stack([rows[i] for i in range(self.positions[prompt])])
            for layer, rows in self.rows[prompt].items()
        }


def run(
    model: GLM53, prompts: Sequence[Sequence[int]], chunk: int | None, draft_tokens: int = 0
) -> tuple[list[PromptResult], TrafficCounters, int, list[int]]:
    """Prefill and decode a batch: results per prompt, this rank's traffic and prompt rows, and accepted drafts."""
    selections = Selections(model, prompts)
    out = model.generate_batch(
        prompts,
        DECODE_STEPS + 1,
        chunk=chunk,
        prompt_logits="all",
        draft_tokens=draft_tokens,
        observer=selections,
        progress=selections.progress,
    )
    results = [
        PromptResult(out.prompt_logits[i].cpu(), out.decode_logits[i].cpu(), out.ids[i], selections.of(i))
        for i in range(len(prompts))
    ]
    return results, out.traffic, selections.prompt_rows, out.accepted


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Of two tensors of equal shape; infinite where one is NaN, which equals nothing."""
    difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return torch.where(difference.isnan(), math.inf, difference).max().item() if difference.numel() else 0.0


def compare(pairs: Sequence[tuple[PromptResult, PromptResult]]) -> dict[str, float | int | bool]:
    return {
        "max_logit_diff": max(largest_difference(a.logits, b.logits) for a, b in pairs),
        "max_decode_logit_diff": max(largest_difference(a.decode_logits, b.decode_logits) for a, b in pairs),
        "topk_mismatches": sum(int((a.topk[i] != b.topk[i]).any(1).sum()) for a, b in pairs for i in b.topk),
        "greedy_equal": all(a.generated == b.generated for a, b in pairs),
    }


def digest(results: Sequence[PromptResult]) -> str:
    sha = hashlib.sha256()
    for result in results:
        sha.update(result.logits.numpy().tobytes() + result.decode_logits.numpy().tobytes())
        sha.update(repr(result.generated).encode())
    return sha.hexdigest()


def dump(folder: Path, prompts: Sequence[Sequence[int]], results: Sequence[PromptResult]) -> None:
    """Everything of the prompt's rows; of the ids, those that the decode steps were fed."""
    tensors: dict[str, Tensor] = {}
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        tensors[f"p{i}.input_ids"] = torch.tensor(prompt)
        tensors[f"p{i}.logits"] = result.logits.contiguous()
        tensors[f"p{i}.generated"] = torch.tensor(result.generated[:DECODE_STEPS])
        tensors |= {f"p{i}.layer{layer}.topk": topk[: len(prompt)].contiguous() for layer, topk in result.topk.items()}
    save_file(tensors, folder / "parallel.safetensors")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--pcp", type=int, default=1, metavar="W", help="ranks that split the queries of a prompt")
    parser.add_argument("--dcp", type=int, default=1, metavar="N", help="ranks that split one copy of the KV")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split the heads")
    parser.add_argument("--ep", type=int, default=1, help="ranks that split the experts")
    parser.add_argument("--dp", type=int, default=1, help="replicas; each runs all prompts")
    parser.add_argument("--atol", type=float, default=0.0, help="largest difference of logits that counts as equal")
    parser.add_argument("--alone", action="store_true", help="each prompt by itself too")
    parser.add_argument("--kv-rows", choices=("fp32", "bf16", "fp8"), default="fp32")
    parser.add_argument("--chunk", type=int, metavar="n", help="prompt tokens of a request in one step (all)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--lengths", type=length_list, default=(1, 2, 63, 1021), help="of random prompts")
    prompts.add_argument("--prompts", type=Path, metavar="FILE.json", help="a list of lists of token ids")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument("--draft-tokens", type=int, default=0, metavar="k", help="of the MTP layer, a token (none)")
    parser.add_argument("--interleave", type=int, default=1, help="positions that stay together on a DCP rank")
    parser.add_argument("--page-size", type=int, default=64, help="rows of a page")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write DIR/parallel.safetensors")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if every rank has a GPU")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a rank waits for another")
    args = parser.parse_args(argv)
    parser.require(args, positive=("chunk", "timeout"), or_zero=("atol", "draft_tokens"))
    return args


def described(sizes: ParallelConfig) -> str:
    """Its sizes, those of 1 left out but for PCP and DCP."""
    more = {"TP": sizes.tp, "EP": sizes.ep, "DP": sizes.dp}
    return " x ".join([f"PCP {sizes.pcp}", f"DCP {sizes.dcp}", *(f"{k} {n}" for k, n in more.items() if n > 1)])


def length_list(text: str) -> tuple[int, ...]:
    return tuple(int(length) for length in text.split(","))


def notes(args: argparse.Namespace) -> list[str]:
    """Why these flags can not, or hardly, give `equal`."""
    found = []
    if args.tp > 1 and args.atol == 0:
        found.append("ranks that split heads (--tp) add in another order than one rank: give --atol 1e-4 or so")
    if args.tp > 1 and args.kv_rows != "fp32":
        found.append(f"with --tp, {args.kv_rows} rows round other sums to other values: only fp32 rows can be equal")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    join_torchrun()
    args = parse(argv)
    try:
        device = device_type(args.device)
        sizes = ParallelConfig(pcp=args.pcp, dcp=args.dcp, tp=args.tp, ep=args.ep, dp=args.dp)
        check_world(sizes)
        config = GLM53Config.from_pretrained(args.checkpoint)
        check_draft_tokens(args.draft_tokens, config)
        drawn = args.prompts is None
        prompts = random_prompts(args.lengths, config, seed=args.seed) if drawn else read_prompts(args.prompts)
        check_prompts(prompts, config, new_positions=DECODE_STEPS)
        if args.dump is not None:
            # Now and not after the run; on every rank, so that all refuse.
            args.dump.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=args.dump):
                pass
    except (ValueError, OSError) as error:
        refuse(error)

    start, speaks = time.perf_counter(), os.environ["RANK"] == "0"
    if speaks:
        print(
            f"{len(prompts)} prompts, {sum(map(len, prompts)):,} tokens and {DECODE_STEPS} decode steps each: "
            f"{described(sizes)} on {device}, {args.kv_rows} rows ...",
            flush=True,
        )
        print("".join(f"note: {note}\n" for note in notes(args)), end="", flush=True)
    results, alone, reports = run_parallel(args, sizes, device, prompts)
    if speaks:
        print(f"{time.perf_counter() - start:.1f} s; the same on one rank ...", flush=True)
    if not reports:
        return 0
    if args.dump is not None:
        dump(args.dump, prompts, results)
    model = load(args, device, decode_parts=args.dcp)
    reference, traffic, *_ = run(model, prompts, None)
    verdict = compare([*zip(results, reference, strict=True), *zip(alone, reference[: len(alone)], strict=True)])
    rows = [r.traffic.rows_stored - r.traffic.rows_dropped for r in reports]
    groups = [[rows[rank] for rank in group] for group in sizes.dcp_groups()]
    report = {
        **verdict,
        "kv_bytes_per_rank": [r.traffic.bytes_stored for r in reports],
        "kv_rows_per_rank": rows,
        "tokens_per_rank": [r.prompt_rows for r in reports],
        "kv_bytes_one_rank": traffic.bytes_stored,
        "kv_rows_one_rank": traffic.rows_stored,
        # Each DCP group holds every row once, split evenly to one interleave unit a request.
        "kv_split_even": all(
            sum(g) == traffic.rows_stored and max(g) - min(g) <= args.interleave * len(prompts) for g in groups
        ),
        "ranks_agree": len({r.digest for r in reports}) == 1,
    }
    if args.draft_tokens:
        report["accepted_drafts"] = accepted = reports[0].accepted
        report["mean_acceptance_length"] = sum((1 + j) * n for j, n in enumerate(accepted)) / sum(accepted)
    report["equal"] = equal = (
        max(verdict["max_logit_diff"], verdict["max_decode_logit_diff"]) <= args.atol
        and verdict["topk_mismatches"] == 0
        and verdict["greedy_equal"] is True
        and report["kv_split_even"] is True
        and (report["ranks_agree"] is True or args.atol > 0)
    )
    print("\n".join(f"{name}: {value}" for name, value in report.items()))
    if args.json:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}
        print(json.dumps(finite, allow_nan=False))
    sys.stdout.flush()
    return 0 if equal else 1


def load(args: argparse.Namespace, device: torch.device | str, **more: object) -> GLM53:
    shape = {"kv_rows": args.kv_rows, "interleave": args.interleave, "page_size": args.page_size}
    return GLM53.from_pretrained(args.checkpoint, device=device, **shape, **more)  # type: ignore[arg-type]


def run_parallel(
    args: argparse.Namespace, sizes: ParallelConfig, device: str, prompts: list[list[int]]
) -> tuple[list[PromptResult], list[PromptResult], list[RankReport]]:
    """The batch, each prompt alone where asked for, and the reports of all ranks: these on rank 0, elsewhere none."""
    timeout = timedelta(seconds=args.timeout)
    with init_world(device, timeout=timeout) as own, ParallelGroups.from_world(sizes, timeout=timeout) as groups:
        try:
            model = load(args, own, parallel=groups)
        except (ValueError, OSError) as error:
            refuse(error)
        results, traffic, prompt_rows, accepted = run(model, prompts, args.chunk, args.draft_tokens)
        alone = [run(model, [p], args.chunk, args.draft_tokens)[0][0] for p in prompts] if args.alone else []
        report = RankReport(prompt_rows, traffic, accepted, digest([*results, *alone]))
        reports: list[RankReport] = [report] * dist.get_world_size()
        dist.gather_object(report, reports if dist.get_rank() == 0 else None)
        return results, alone, reports if dist.get_rank() == 0 else []


if __name__ == "__main__":
    sys.exit(main())
