"""examples/generate.py under torchrun: ranks that read their parts continue prompts as one rank does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples import generate
from models.glm53 import GLM53
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import RandomSource, save_sharded_checkpoint, weight_bytes
from tests.checkpoints import random_prompts
from tests.model.weight_cases import BLOCKY
from tests.ranks.test_verify_parallel import refusal, torchrun


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_sharded_checkpoint(path, BLOCKY, RandomSource(BLOCKY, seed=0, device="cpu").tensors(), shard_bytes=2**18)
    return path


@pytest.mark.parametrize("source", ["read", "drawn"])
def test_two_ranks_continue_as_one(checkpoint: Path, tmp_path: Path, source: str) -> None:
    prompts = random_prompts((5, 41), BLOCKY.vocab_size)
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
        ("--pcp 3 --random 5", "torchrun started 2"),
        ("--tp 2 --ep 2 --random 0", "--random 0"),
        ("--pcp 2 --prompts {dir}/outside.json", "ids outside [0, 128), among them [128, True]"),
        ("--pcp 2 --prompts {dir}/empty.json", "each with at least one"),
        ("--pcp 2 --random 5 --chunk 0", "--chunk 0"),
        ("--pcp 2", "--prompts"),
        ("--pcp 2 --random 5 --draft-tokens -1", "--draft-tokens -1"),
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
    (tmp_path / "outside.json").write_text("[[128, 5, true]]")
    (tmp_path / "empty.json").write_text("[[1], []]")
    said = refusal(
        generate.main, monkeypatch, capsys, 1, "--checkpoint", checkpoint, *flags.format(dir=tmp_path).split()
    )
    assert reason in said
