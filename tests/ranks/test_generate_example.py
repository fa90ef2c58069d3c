"""examples/generate.py under torchrun: ranks that read their parts continue prompts as one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples import generate
from examples.prompts import random_prompts
from examples.world import ALONE
from models.glm53 import GLM53
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import RandomSource, save_checkpoint, save_sharded_checkpoint, weight_bytes
from tests import checkpoints
from tests.model.weight_cases import BLOCKY
from tests.ranks.test_verify_parallel import ROOT, refusal, torchrun


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_sharded_checkpoint(path, BLOCKY, RandomSource(BLOCKY, seed=0, device="cpu").tensors(), shard_bytes=2**18)
    return path


@pytest.mark.parametrize("source", ["read", "drawn"])
def test_two_ranks_continue_as_one(checkpoint: Path, tmp_path: Path, source: str) -> None:
    prompts = checkpoints.random_prompts((5, 41), BLOCKY.vocab_size)
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(prompts))
    flags = "--pcp 2 --dcp 2 --ep 2 --keep-fp8 --dtype bfloat16 --kv-rows fp8 --chunk 16 --max-new-tokens 6 --json"
    folder = checkpoint
    if source == "drawn":  # the same model: only its description is there
        folder = tmp_path
        (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        flags += " --random-weights --draft-tokens 2"  # drafts change nothing
    run = torchrun(2, "generate.py", "--checkpoint", folder, "--prompts", file, *flags.split())
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    dtype = torch.bfloat16
    alone = GLM53.from_pretrained(checkpoint, dtype=dtype, keep_fp8=True, kv_rows="fp8", decode_parts=2)
    assert report["ids"] == [alone.generate(prompt, 6) for prompt in prompts]
    for rank, memory in enumerate(report["ranks"]):
        split = WeightSplit(ep=2, ep_rank=rank)
        assert memory["weights"] == weight_bytes(BLOCKY, dtype=dtype, keep_fp8=True, split=split)
        assert memory["host_peak"] > memory["weights"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--pcp 3 --random 5", "needs 3 ranks, there are 2"),
        ("--tp 2 --ep 2 --random 0", "--random 0"),
        ("--pcp 2 --prompts {dir}/outside.json", "prompt 0 has ids outside [0, 128), among them [-1, 128]"),
        ("--pcp 2 --prompts {dir}/mask.json", "mask.json is not a list of lists of token ids"),
        ("--pcp 2 --prompts {dir}/empty.json", "prompt 1 is empty"),
        ("--pcp 2 --prompts {dir}/none.json", "there are no prompts"),
        ("--pcp 2 --prompts {dir}/broken.json", "broken.json is not JSON"),
        ("--pcp 2 --random 1048576", "prompt 0: 1048576 tokens and 15 behind them exceed max_position_embeddings="),
        ("--pcp 2 --random 5 --chunk 0", "--chunk 0"),
        ("--pcp 2", "--prompts"),
        ("--pcp 2 --random 5 --timeout nan", "--timeout nan must be positive"),
        ("--pcp 2 --random 5 --draft-tokens -1", "--draft-tokens -1 must be positive or zero"),
    ],
)
def test_wrong_flags_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    reason: str,
) -> None:
    files = {"outside": "[[128, 5, -1]]", "mask": "[[true]]", "empty": "[[1], []]", "none": "[]", "broken": "[[1"}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    said = refusal(
        generate.main, monkeypatch, capsys, 1, "--checkpoint", checkpoint, *flags.format(dir=tmp_path).split()
    )
    assert reason in said


def alone(*flags: object) -> subprocess.CompletedProcess[str]:
    """Without torchrun."""
    env = {name: value for name, value in os.environ.items() if name not in ALONE}
    return subprocess.run(
        [sys.executable, "examples/generate.py", *map(str, flags), "--device", "cpu"],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_one_rank_needs_no_torchrun(checkpoint: Path) -> None:
    run = alone("--checkpoint", checkpoint, "--random", 5, "--max-new-tokens", 2, "--json")
    assert run.returncode == 0, run.stderr
    (prompt,) = random_prompts([5], BLOCKY)
    assert json.loads(run.stdout.splitlines()[-1])["ids"] == [GLM53.from_pretrained(checkpoint).generate(prompt, 2)]
    run = alone("--checkpoint", checkpoint, "--random", 5, "--tp", 2)
    assert (run.returncode, run.stdout) == (2, "")
    assert "needs 2 ranks, there are 1: start it with torchrun" in run.stderr


@pytest.mark.parametrize("fault", ["a missing tensor", "a cut through blocks", "no file"])
def test_checkpoint_that_can_not_be_loaded_is_refused(tmp_path: Path, fault: str) -> None:
    config = replace(BLOCKY, moe_intermediate_size=192) if fault == "a cut through blocks" else BLOCKY
    tensors = dict(RandomSource(config, seed=0, device="cpu").tensors())
    if fault == "a missing tensor":
        del tensors["model.norm.weight"]
    save_checkpoint(tmp_path, config, tensors)
    if fault == "no file":
        (tmp_path / "model.safetensors").unlink()
    run = alone("--checkpoint", tmp_path, "--random", 5, "--keep-fp8")
    reasons = {"a missing tensor": "model.norm.weight is missing", "a cut through blocks": "inside a block of 128"}
    assert run.returncode == 2, run.stderr
    assert "rank 0: refused: " in run.stderr
    assert "Traceback" not in run.stderr
    assert reasons.get(fault, "lacks safetensors files") in run.stderr
