"""Built oracles, one of a kind per test run however many processes ask for it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class OracleCase:
    path: Path
    """A checkpoint directory; see ``tests.oracle.builder`` for what else is in it."""
    tensors: dict[str, Tensor]
    prompts: list[list[int]]
    results: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> OracleCase:
        description = json.loads((path / "oracle.json").read_text())
        tensors = load_file(path / "oracle.safetensors")
        return cls(path, tensors, description["prompts"], description["results"])


def oracle_case(
    tmp_path_factory: pytest.TempPathFactory, preset: str, *, fp8: bool = False, seed: int = 0
) -> OracleCase:
    """Build the oracle, or wait for the test process that does."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder that all workers of a run see
    path = root / f"oracle_{preset}_{'fp8' if fp8 else 'fp32'}_seed{seed}"
    with FileLock(f"{path}.lock", timeout=280):
        # Written last, so that a build that failed is not taken for one.
        if not (path / "oracle.json").is_file():
            # Here, since transformers takes seconds to import and most of a run does without.
            from tests.oracle.builder import build_oracle

            build_oracle(path, preset, seed, fp8)
    return OracleCase.read(path)
