"""The two examples under torchrun: they find ranks equal to one rank, and they notice when they are not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.demo_model import CONFIG
from models.glm53.weights import random_tensors, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SMALL = replace(CONFIG, index_topk=16)


def torchrun(ranks: int, script: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, f"examples/{script}", *map(str, flags), "--device", "cpu", "--timeout", "60"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(path, SMALL, random_tensors(SMALL, seed=0))
    return path


@pytest.mark.parametrize(
    "pcp, dcp, flags",
    [
        (2, 2, "--kv-rows fp8 --alone"),
        (3, 1, "--chunk 7"),
        (1, 2, "--kv-rows bf16 --interleave 4 --page-size 8"),
        (4, 2, "--chunk 64"),
    ],
)
def test_ranks_equal_one_rank(checkpoint, pcp, dcp, flags):
    lengths = [1, 2, 63, 130]
    flags = [*flags.split(), "--lengths", ",".join(map(str, lengths)), "--json"]
    ranks = max(pcp, dcp)
    run = torchrun(ranks, "verify_parallel.py", "--checkpoint", checkpoint, "--pcp", pcp, "--dcp", dcp, *flags)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert (report["max_logit_diff"], report["max_decode_logit_diff"], report["topk_mismatches"]) == (0.0, 0.0, 0)
    assert report["greedy_equal"] is True
    assert sum(report["tokens_per_rank"]) == sum(lengths) * ranks // pcp
    copies = ranks // dcp
    assert sum(report["kv_bytes_per_rank"]) == copies * report["kv_bytes_one_rank"]


def test_dump_holds_what_the_ranks_made(checkpoint, tmp_path):
    prompts = [[5, 6, 7] * 20, [1]]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    flags = ["--prompts", tmp_path / "prompts.json", "--dump", tmp_path / "out", "--pcp", 2, "--dcp", 2]
    run = torchrun(2, "verify_parallel.py", "--checkpoint", checkpoint, *flags)
    assert run.returncode == 0, run.stdout + run.stderr
    made = load_file(tmp_path / "out" / "parallel.safetensors")
    for i, prompt in enumerate(prompts):
        assert made[f"p{i}.input_ids"].tolist() == prompt
        assert made[f"p{i}.logits"].shape == (len(prompt), SMALL.vocab_size)
        assert made[f"p{i}.generated"].shape == (16,)
        assert made[f"p{i}.generated"][0] == made[f"p{i}.logits"][-1].argmax()
        for layer in range(SMALL.num_hidden_layers):
            topk = made[f"p{i}.layer{layer}.topk"]
            assert topk.shape == (len(prompt), SMALL.index_topk)
            counts = torch.arange(1, len(prompt) + 1).clamp(max=SMALL.index_topk)
            assert torch.equal((topk >= 0).sum(1), counts)
            assert all(row[:n].tolist() == sorted(row[:n].tolist()) for row, n in zip(topk, counts, strict=True))


@pytest.mark.parametrize("flags, reason", [("--tp 2", "tp=2"), ("--pcp 2 --lengths 5,0", "(5, 0)")])
def test_wrong_flags_are_refused_on_every_rank(checkpoint, flags, reason):
    run = torchrun(2, "verify_parallel.py", "--checkpoint", checkpoint, *flags.split())
    assert run.returncode != 0
    for rank in (0, 1):
        (line,) = [line for line in run.stderr.splitlines() if line.startswith(f"rank {rank}: ")]
        assert reason in line
    assert "exitcode  : 2" in run.stderr


@pytest.mark.parametrize("sabotage", [None, "positions", "chunk", "lse"])
def test_demo_says_whether_ranks_equal_one_rank(sabotage):
    flags = ["--tokens", 600, "--chunk", 150, "--decode-steps", 4]
    run = torchrun(2, "long_prefill.py", *flags, *(["--sabotage", sabotage] if sabotage else []))
    verdict = [line for line in run.stdout.splitlines() if line.startswith("equal to one rank:")]
    assert verdict == [f"equal to one rank: {'no' if sabotage else 'yes'}"], run.stdout + run.stderr
    assert (run.returncode == 0) == (sabotage is None)
