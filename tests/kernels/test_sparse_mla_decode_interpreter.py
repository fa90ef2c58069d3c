"""The plain Triton decode kernels in Triton's interpreter, without a GPU, against the reference.

The interpreter multiplies bfloat16 operands wrongly, so queries are float32 here. It has to be chosen before triton is
imported, hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the interpreter is triton's")

CHECKS = """
import torch
import triton.runtime.interpreter as interpreter

patch_tensor = interpreter._patch_lang_tensor


def patch_index_too(tensor, scope):
    # numpy 2.4 no longer takes an array of one element for an integer, which a loop bound is to the interpreter.
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_index_too

from cptools.formats import BF16_MLA, FP8_MLA
from cptools.kernels.sparse_mla.decode_reference import sparse_mla_decode_reference
from cptools.kernels.sparse_mla.decode_triton import sparse_mla_decode_triton

generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator)


def check(row_format, tokens, heads, columns, parts, counts=None, integers=torch.int32, factor=1.0):
    rows = row_format.pack(normal(300, 512), normal(300, 64))
    slots = torch.randint(1, 300, (tokens, columns), generator=generator).to(integers)
    slots[torch.rand(slots.shape, generator=generator) < 0.2] = -1
    slots[0, ::5] = 300
    slots[0, 1::5] = 2147480000
    slots[-1] = -1
    unused = torch.ones(300, dtype=torch.bool)
    unused[slots[(slots >= 0) & (slots < 300)].long()] = False
    rows[unused] = 0xFF
    query = normal(tokens, heads, 576) * factor
    scale = 0.0625
    reference, reference_lse = sparse_mla_decode_reference(
        query, rows, slots, counts, row_format=row_format, scale=scale
    )
    out, lse = sparse_mla_decode_triton(
        query, rows, slots, counts, scale, row_format is FP8_MLA, parts, torch.float32
    )
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, reference_lse, rtol=1e-5, atol=1e-4)


check(FP8_MLA, 2, 64, 128, 2)
check(FP8_MLA, 3, 7, 64, 1, counts=torch.tensor([50, 0, 64]))
check(BF16_MLA, 2, 70, 192, 3, counts=torch.tensor([1, 500], dtype=torch.int32), integers=torch.int64)
check(FP8_MLA, 2, 3, 320, 8, factor=1e30)
check(FP8_MLA, 2, 2, 512, 16)
print("checked")
"""


def test_decode_kernels_in_the_interpreter() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    assert "checked" in child.stdout
