"""Run under torchrun on two GPUs: heads, experts and replicas split over NCCL against one of the GPUs.

torchrun --standalone --nproc-per-node 2 tests/gpu/composition_ranks.py CHECKPOINT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from cptools import ParallelConfig, ParallelGroups, init_world
from cptools.collectives import require_agreement
from models.glm53 import GLM53
from tests.checkpoints import random_prompts

SPLITS = [
    {"tp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "dcp": 2, "ep": 2},
    {"pcp": 2, "ep": 2},
    {"pcp": 2, "dcp": 2, "ep": 2},
    {"dcp": 2, "ep": 2},
    {"dp": 2, "ep": 2},
]
LENGTHS = (1, 5, 17, 40, 64, 90, 130, 200)
NEW_TOKENS = 5
MOST_REJECTED = 2


class Answer:
    """Each prompt's tokens, logits and selections."""

    def __init__(self, model: GLM53, prompts: list[list[int]], draft_tokens: int = 0) -> None:
        self.selections: list[torch.Tensor] = []

        def observe(layer, plan, prompt_topk, decode_topk) -> None:
            packed = model.cp.unshard(prompt_topk, plan.prompt)
            rows = [*packed.split(list(plan.prompt.query_lens)), *decode_topk.split(list(plan.decode_query_lens))]
            self.selections.extend(row.clone() for row in rows)

        more = {"draft_tokens": draft_tokens} if draft_tokens else {"observer": observe}
        out = model.generate_batch(prompts, NEW_TOKENS, prompt_logits="all", **more)
        self.ids = out.ids
        self.logits = [torch.cat(pair) for pair in zip(out.prompt_logits, out.decode_logits, strict=True)]
        count = len(prompts)
        self.selections = [torch.cat(self.selections[i::count]) for i in range(count if self.selections else 0)]


def main(path: str) -> None:
    with init_world("cuda") as device:
        alone = GLM53.from_pretrained(path, device=device)
        prompts = random_prompts(LENGTHS, alone.config.vocab_size)
        want = Answer(alone, prompts)
        for sizes in SPLITS:
            with ParallelGroups.from_world(ParallelConfig(**sizes)) as groups:
                model = GLM53.from_pretrained(path, device=device, parallel=groups)
                own = list(range(groups.coords.dp_rank, len(prompts)))  # replicas have different work
                got = Answer(model, [prompts[i] for i in own])
                drafted = Answer(model, [prompts[i] for i in own], draft_tokens=3)
                same = [i for i in own if torch.equal(got.selections[i - own[0]], want.selections[i])]
                worst = 0.0
                for i in same:
                    if got.ids[i - own[0]] != want.ids[i]:
                        raise SystemExit(f"{sizes}: prompt {i}: {got.ids[i - own[0]]}, one rank {want.ids[i]}")
                    worst = max(worst, float((got.logits[i - own[0]] - want.logits[i]).abs().max()))
                rejected = len(own) - len(same)
                if not worst <= 1e-3 or rejected > MOST_REJECTED:
                    raise SystemExit(f"{sizes}: logits differ by {worst}, {rejected} prompts select other positions")
                differ = sum(drafted.ids[i - own[0]] != got.ids[i - own[0]] for i in same)
                if differ > MOST_REJECTED:
                    raise SystemExit(f"{sizes}: with drafts {differ} prompts get other tokens")
                if "dp" not in sizes:
                    require_agreement("tokens", [got.ids, drafted.ids], group=dist.group.WORLD)
                if dist.get_rank() == 0:
                    print(f"{sizes}: within {worst:.1e}, {rejected} rejected, {differ} drafted otherwise", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
