"""Several GPUs of one host, where there are some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import KDIM, save_random

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def on_two_gpus(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(ROOT / "tests/gpu" / script), str(path)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_heads_experts_and_replicas_over_two_gpus_equal_one(tmp_path: Path) -> None:
    run = on_two_gpus("composition_ranks.py", save_random(tmp_path, KDIM))
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.count("rejected") == 7


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_over_two_gpus_equal_eager_steps(tmp_path: Path) -> None:
    run = on_two_gpus("runner_ranks.py", save_random(tmp_path, KDIM))
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.count("captured equal to eager") == 6
