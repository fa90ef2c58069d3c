"""Run under torchrun on GPUs: the runner's graphs over ranks, NCCL inside, against the same steps run eagerly.

torchrun --standalone --nproc-per-node 2 tests/gpu/runner_ranks.py CHECKPOINT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from cptools import ParallelConfig, ParallelGroups, init_world
from cptools.collectives import require_agreement
from models.glm53 import GLM53
from tests.gpu.test_model_runner import runner_of, schedule

SPLITS = [{"pcp": 2, "dcp": 2}, {"pcp": 2}, {"dcp": 2}, {"tp": 2}, {"pcp": 2, "dcp": 2, "ep": 2}, {"tp": 2, "ep": 2}]


def main(path: str) -> None:
    with init_world("cuda") as device:
        for sizes in SPLITS:
            with ParallelGroups.from_world(ParallelConfig(**sizes)) as groups:
                model = GLM53.from_pretrained(path, device=device, dtype=torch.bfloat16, parallel=groups, kv_rows="fp8")
                captured, eager = (runner_of(model, graphs=graphs) for graphs in (True, False))
                tokens = []
                for one, other in zip(schedule(captured, 40), schedule(eager, 40), strict=True):
                    tokens.append(one)
                    if one != other:
                        raise SystemExit(f"{sizes}: step {len(tokens)}: {one} captured, {other} eager")
                same = all(
                    torch.equal(getattr(captured.cache.kv, rows).pages, getattr(eager.cache.kv, rows).pages)
                    for rows in ("mla_rows", "index_rows")
                )
                require_agreement("tokens of the runner", tokens, group=dist.group.WORLD)
                if not same:
                    raise SystemExit(f"{sizes}: other rows are cached")
                if dist.get_rank() == 0:
                    print(f"{sizes}: {sum(map(len, tokens))} tokens, captured equal to eager", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
