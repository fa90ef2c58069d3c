"""Peak memory of a one-rank CPU prefill at several prompt lengths: is it linear in the prompt?

    python benchmarks/prefill_memory.py --out benchmarks/results/prefill_memory.json

Model and text are those of examples/long_prefill.py. Each length runs in a process of its own, in one piece. Its figure
is the peak resident set (ru_maxrss) less the resident set once the model was loaded and one short prompt was run, which
pays for the libraries' own buffers; the cache is part of it. A [T, T] anything would show as growth per token. The
seconds are those of one thread beside whatever else ran: `load_average` is of the minute before each length's end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from examples.demo_model import CONFIG, save_demo_checkpoint, standard_library_prompt
from models.glm53 import GLM53

MIB = 2**20


def resident() -> int:
    """Bytes of this process in memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(checkpoint: Path, tokens: int) -> dict[str, float]:
    torch.set_num_threads(1)
    model = GLM53.from_pretrained(checkpoint)
    prompt = standard_library_prompt(tokens)
    model.prefill_logits(prompt[:512], last_only=True)
    baseline, start = resident(), time.perf_counter()
    model.prefill_logits(prompt, last_only=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    above = (peak - baseline) / MIB
    return {
        "tokens": tokens,
        "baseline_mib": round(baseline / MIB, 1),
        "above_baseline_mib": round(above, 1),
        "mib_per_1k_tokens": round(above / (tokens / 1024), 3),
        "seconds": round(seconds, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def commit() -> str | None:
    """Of the checkout that holds this file; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 32_768, 65_536])
    parser.add_argument("--tolerance", type=float, default=0.2, help="largest spread of MiB per 1K tokens")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefill_memory.json"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_demo_checkpoint(Path(folder))
        for tokens in args.tokens:
            # A fresh interpreter: ru_maxrss never falls, and a fork would inherit this process's.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (Path(folder), tokens)))
            print(rows[-1], flush=True)
    per_1k = [row["mib_per_1k_tokens"] for row in rows]
    spread = max(per_1k) / min(per_1k) - 1
    kv = CONFIG.num_cache_layers * CONFIG.mla_row_dim * 4 + len(CONFIG.index_layers) * CONFIG.index_row_dim * 4
    result = {
        "what": "peak memory of a one-rank CPU prefill above its baseline, one piece, float32 rows",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "threads": 1,
        "rows": rows,
        "spread": round(spread, 4),
        "kv_mib_per_1k_tokens": round(kv * 1024 / MIB, 3),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"MiB per 1K tokens within {spread:.1%}: {'yes' if spread <= args.tolerance else 'no'}")
    return 0 if spread <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
