"""`examples/verify_parallel.py` over every split that the library promises to be bit-equal to one rank.

    python -m tests.ranks.verify_matrix

Nine (pcp, dcp) pairs x a tiny checkpoint and one with GLM-5.3's head dims x fp32 and FP8 rows, eight lengths as one
batch and each alone. Prints a line per run; exit status 1 if one of them is not equal.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints import KDIM, TINY, save_random

ROOT = Path(__file__).resolve().parents[2]
SPLITS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), (1, 4))
LENGTHS = "1,2,3,7,63,64,65,1021"
TIMEOUT_S = 600


def verify(checkpoint: Path, pcp: int, dcp: int, kv_rows: str) -> dict[str, object]:
    """The report of one run; ValueError with its output if it gave none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(max(pcp, dcp))]
    command += ["examples/verify_parallel.py", "--checkpoint", str(checkpoint), "--pcp", str(pcp), "--dcp", str(dcp)]
    command += ["--kv-rows", kv_rows, "--lengths", LENGTHS, "--alone", "--json", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = run.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise ValueError(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    return {**json.loads(lines[-1]), "exit": run.returncode}


def is_exact(report: dict[str, object]) -> bool:
    wanted = {
        "exit": 0,
        "max_logit_diff": 0.0,
        "max_decode_logit_diff": 0.0,
        "topk_mismatches": 0,
        "greedy_equal": True,
        "kv_split_even": True,
        "ranks_agree": True,
    }
    return all(report[name] == value for name, value in wanted.items())


def main() -> int:
    failed = 0
    print("checkpoint rows pcp dcp  prefill diff  decode diff  top-k  greedy  rows stored per rank     s")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {name: save_random(Path(folder) / name, c) for name, c in (("tiny", TINY), ("kdim", KDIM))}
        for (name, path), kv_rows, (pcp, dcp) in itertools.product(checkpoints.items(), ("fp32", "fp8"), SPLITS):
            start = time.perf_counter()
            report = verify(path, pcp, dcp, kv_rows)
            exact, seconds = is_exact(report), time.perf_counter() - start
            print(
                f"{name:<10} {kv_rows:<4} {pcp:>3} {dcp:>3}  {report['max_logit_diff']:>12}  "
                f"{report['max_decode_logit_diff']:>11}  {report['topk_mismatches']:>5}  "
                f"{report['greedy_equal']!s:>6}  {report['kv_rows_per_rank']!s:<22} {seconds:>4.0f}"
                f"{'' if exact else '  NOT EQUAL'}",
                flush=True,
            )
            failed += not exact
    print(f"{len(checkpoints) * 2 * len(SPLITS) - failed} equal, {failed} not equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
