"""The Triton kernel of sparse MLA on the interpreter, in a child process (float32: BF16 products are wrong there)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the interpreter is part of triton")

CHILD = """
import torch
from triton.runtime import interpreter

# Triton 3.6 reads a loop bound by int() of an array of one element, which NumPy 2.4 refuses.
patch = interpreter._patch_lang_tensor

def patch_index(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

interpreter._patch_lang_tensor = patch_index

from cptools.kernels.sparse_mla import reference
from cptools.kernels.sparse_mla.triton import sparse_mla_triton

torch.manual_seed(0)
cases = 0
for heads, dim, v_dim, columns in [(3, 24, 16, 20), (17, 40, 33, 33), (1, 16, 16, 1), (33, 20, 4, 64)]:
    for kind in ["plain", "holes", "huge"]:
        rows = torch.randn(50, dim)
        query = torch.randn(5, heads, dim)
        ids = torch.randint(0, 25, (5, columns), dtype=torch.int64 if kind == "holes" else torch.int32) * 2
        counts = None
        if kind == "holes":
            ids[0] = -1
            ids[1, ::2] = 2147480000
            ids[2, 1:] = -1
            ids[3, ::3] = 2**32
            counts = torch.tensor([columns, columns, columns, columns, columns // 2])
        if kind == "huge":
            query[..., -1], rows[:, -1] = 1e20, 1e10
            rows[::4, -1] = -1e10
        rows[1::2] = torch.nan
        out, lse = sparse_mla_triton(query, rows, ids, counts, 0.3, v_dim, torch.float32)
        if counts is not None:
            ids = ids.masked_fill(torch.arange(columns) >= counts[:, None], -1)
        want, want_lse = reference.sparse_mla(query, rows, ids, scale=0.3, v_dim=v_dim)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=2e-5)
        cases += 1
print("checked", cases)
"""


def test_triton_kernel_on_the_interpreter() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert "checked 12" in child.stdout
