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

from examples import demo_model, long_prefill, verify_parallel
from examples.demo_model import CONFIG
from models.glm53 import GLM53Config
from models.glm53.weights import random_tensors, save_checkpoint
from tests.checkpoints import save_guessable

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
        (2, 2, "--kv-rows fp8 --alone --ep 2"),
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


def test_ranks_that_split_heads_and_experts_are_close_to_one_rank(checkpoint):
    """DP 2 x TP 2, each of the two replicas with its KV over both of its ranks."""
    flags = "--dp 2 --tp 2 --dcp 2 --ep 4 --atol 1e-4 --lengths 1,2,63,130 --json".split()
    run = torchrun(4, "verify_parallel.py", "--checkpoint", checkpoint, *flags)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert 0 < max(report["max_logit_diff"], report["max_decode_logit_diff"]) < 1e-4
    assert (report["topk_mismatches"], report["greedy_equal"], report["ranks_agree"]) == (0, True, True)
    assert sum(report["kv_bytes_per_rank"]) == 2 * report["kv_bytes_one_rank"]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--tp 2", ["give --atol 1e-4 or so"]),
        ("--tp 2 --atol 1e-4", []),
        ("--tp 2 --atol 1e-4 --kv-rows fp8", ["only fp32 rows"]),
        ("--tp 2 --kv-rows bf16", ["give --atol", "only fp32 rows"]),
        ("--pcp 2 --kv-rows fp8", []),
    ],
)
def test_flags_that_can_hardly_be_equal_are_noted(flags, words):
    said = verify_parallel.notes(verify_parallel.parse(["--checkpoint", "demo", *flags.split()]))
    assert len(said) == len(words)
    assert all(word in note for word, note in zip(words, said, strict=True))


def test_ranks_with_drafts_equal_one_rank_without(tmp_path):
    config = replace(SMALL, num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)
    checkpoint = save_guessable(tmp_path, config)
    flags = "--pcp 2 --dcp 2 --draft-tokens 3 --alone --chunk 40 --kv-rows fp8 --lengths 1,2,63,130 --json".split()
    run = torchrun(2, "verify_parallel.py", "--checkpoint", checkpoint, *flags)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert (report["max_logit_diff"], report["max_decode_logit_diff"], report["topk_mismatches"]) == (0.0, 0.0, 0)
    assert (report["greedy_equal"], report["kv_split_even"]) == (True, True)
    gained = [(1 + j) * count for j, count in enumerate(report["accepted_drafts"])]
    # The last round of a prompt may accept drafts behind its last token.
    assert 0 <= sum(gained) - 4 * verify_parallel.DECODE_STEPS <= 4 * 3
    assert report["mean_acceptance_length"] == sum(gained) / sum(report["accepted_drafts"]) > 1


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


def test_a_refusal_ends_the_report_of_torchrun(checkpoint):
    run = torchrun(2, "verify_parallel.py", "--checkpoint", checkpoint, "--pcp", 2, "--interleave", 3)
    assert run.returncode == 1
    report = run.stderr[run.stderr.rindex("Root Cause") :]
    assert "exitcode  : 2" in report
    assert "refused: interleave=3" in report


def refusal(main, monkeypatch, capsys, rank, *flags):
    """What one of two ranks says when it refuses these flags; without torchrun, since it does so before it connects."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit) as stop:
        main([*map(str, flags), "--device", "cpu"])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--pcp 3", "needs 3 ranks, there are 2"),
        ("--pcp 2 --lengths 5,0", "lengths 5, 0 of"),
        ("--pcp 2 --chunk 0", "refused: --chunk 0 must be positive\n"),
        ("--pcp 2 --timeout 0", "refused: --timeout 0.0 must be positive\n"),
        ("--pcp 2 --atol -1", "refused: --atol -1.0 must be positive or zero\n"),
        ("--pcp 2 --draft-tokens 3", "--draft-tokens 3 needs an MTP layer, the checkpoint has none"),
        ("--pcp 2 --draft-tokens -1", "--draft-tokens -1 must be positive or zero"),
        ("--pcp 2 --lengths 131072", "prompt 0: 131072 tokens and 16 behind them exceed"),
        ("--pcp two", "two"),
        ("--pcp 2 --prompts {dir}/empty.json", "prompt 1 is empty"),
        ("--pcp 2 --prompts {dir}/outside.json", "prompt 0 has ids outside [0, 257), among them [-3, 257]"),
        ("--pcp 2 --prompts {dir}/broken.json", "broken.json is not JSON"),
        ("--pcp 2 --prompts {dir}/none.json", "none.json"),
        ("--pcp 2 --dump {dir}/empty.json/out", "empty.json"),
    ],
)
def test_wrong_flags_are_refused_on_every_rank(checkpoint, tmp_path, monkeypatch, capsys, rank, flags, reason):
    for name, text in {"empty": "[[1], []]", "outside": "[[257, 5, -3]]", "broken": "[[1"}.items():
        (tmp_path / f"{name}.json").write_text(text)
    flags = flags.format(dir=tmp_path).split()
    said = refusal(verify_parallel.main, monkeypatch, capsys, rank, "--checkpoint", checkpoint, *flags)
    assert said.startswith(f"rank {rank}: refused: ")
    assert reason in said


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--dcp 1 --sabotage lse", "dcp=1"),
        ("--pcp 1 --sabotage positions", "pcp=1"),
        ("--tokens 1500 --chunk 2000 --sabotage chunk", "tokens=1500, chunk=2000"),
        ("--chunk 0", "--chunk 0"),
        ("--pcp 3 --dcp 1", "needs 3 ranks, there are 2"),
        ("--atol nan", "--atol nan must be positive or zero"),
    ],
)
def test_demo_refuses_what_would_show_nothing(monkeypatch, capsys, flags, reason):
    assert reason in refusal(long_prefill.main, monkeypatch, capsys, 1, *flags.split())


def test_a_difference_that_is_no_number_is_null_in_json(checkpoint, monkeypatch, capsys):
    """JSON knows neither NaN nor Infinity."""

    def nan_logits(args, sizes, device, prompts):
        results, traffic, rows, accepted = verify_parallel.run(verify_parallel.load(args, device), prompts, None)
        results[0].logits[0, 0] = float("nan")
        return results, [], [verify_parallel.RankReport(rows, traffic, accepted, "")]

    monkeypatch.setattr(verify_parallel, "run_parallel", nan_logits)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    flags = ["--checkpoint", str(checkpoint), "--lengths", "3", "--json", "--device", "cpu"]
    assert verify_parallel.main(flags) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert report["max_logit_diff"] is None
    assert report["equal"] is False


@pytest.mark.parametrize("sabotage", [None, "positions", "chunk", "lse"])
def test_demo_says_whether_ranks_equal_one_rank(sabotage):
    flags = ["--tokens", 600, "--chunk", 150, "--decode-steps", 4]
    run = torchrun(2, "long_prefill.py", *flags, *(["--sabotage", sabotage] if sabotage else []))
    verdict = [line for line in run.stdout.splitlines() if line.startswith("equal to one rank:")]
    assert verdict == [f"equal to one rank: {'no' if sabotage else 'yes'}"], run.stdout + run.stderr
    assert (run.returncode == 0) == (sabotage is None)


def test_demo_checkpoint_from_the_command_line(tmp_path, capsys):
    for flags, layers in ([], 0), (["--mtp"], 1):
        assert demo_model.main([str(tmp_path / "demo"), *flags]) == 0
        assert GLM53Config.from_pretrained(tmp_path / "demo").num_nextn_predict_layers == layers
