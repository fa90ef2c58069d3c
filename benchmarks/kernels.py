"""Every kernel against its floor, its target and the best known peer, on one GPU.

    python benchmarks/kernels.py [--only topk_select,lse_merge] [--out benchmarks/results/kernels.json]

Each file of `benchmarks/kernel_rows` measures one op (`rows()` yields `Row`s). Times are medians of CUDA-graph replays;
random inputs, larger than L2 or rotated; every timed result was compared with a reference first. Targets are those set
for one H200. Prints a table and writes the JSON that the documentation quotes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import pkgutil
import sys
import traceback
from pathlib import Path

import torch

import benchmarks.kernel_rows
from benchmarks.gpu_timing import Row

HEADER = f"{'kernel':<28}{'impl':<10}{'shape':<44}{'us':>9}{'floor':>9}{'ratio':>7}{'target':>9}  met  {'error':>8}"


def modules(only: list[str]) -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(benchmarks.kernel_rows.__path__)]
    if unknown := set(only) - set(names):
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: not among {', '.join(names)}")
    return only or names


def line(row: Row) -> str:
    target = "" if row.target_us is None else f"{row.target_us:.1f}"
    met = {None: "", True: "yes", False: "NO"}[row.met]
    return (
        f"{row.kernel:<28}{row.impl:<10}{row.shape:<44}{row.median_us:>9.1f}{row.floor_us:>9.1f}"
        f"{row.median_us / row.floor_us:>7.1f}{target:>9}  {met:<4} {row.error:>8.1e}"
    )


def write(file: Path, rows: list[dict[str, object]]) -> None:
    """Put rows in the file in place of older ones of the same kernels."""
    measured = {row["kernel"] for row in rows}
    kept = json.loads(file.read_text()) if file.exists() else []
    kept = [row for row in kept if row["kernel"] not in measured]
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in [*kept, *rows]) + "\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="names of files in benchmarks/kernel_rows, by comma")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON, keeping rows of other kernels")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are measured on a GPU, and there is none")
    import triton

    about = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
    print(about, HEADER, sep="\n")
    failed = 0
    for name in modules([name for name in arguments.only.split(",") if name]):
        rows: list[dict[str, object]] = []
        try:
            for row in importlib.import_module(f"benchmarks.kernel_rows.{name}").rows():
                print(line(row), flush=True)
                rows.append({**dataclasses.asdict(row), "met": row.met, **about})
        except Exception:  # one kernel's trouble must not cost the figures of the others
            traceback.print_exc()
            failed = 1
        if arguments.out and rows:
            write(arguments.out, rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
