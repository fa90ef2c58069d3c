"""The plain Triton kernels in Triton's interpreter, against the reference, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the interpreter is Triton's")

CHECKS = """
import torch
from cptools.formats import FP8
from cptools.kernels.indexer_topk import IndexKeys, indexer_scores_fp8, reference
from cptools.kernels.indexer_topk.triton import carry_into, fill_beyond, scores_into

generator = torch.Generator().manual_seed(0)
def integers(*shape):
    return torch.randint(-2, 3, shape, generator=generator).float()

def scored(rows, columns, *given):
    out = torch.full((rows, columns), float("nan"))
    scores_into(out, *given)
    return out

# Floats: odd shapes, sequences that start anywhere, a chunk from position 40 on.
for heads, dim, dtype in [(3, 20, torch.float32), (17, 32, torch.float16)]:
    query, weights, keys = integers(4, heads, dim).to(dtype), integers(4, heads), integers(150, dim).to(dtype)
    starts, lens = torch.tensor([0, 0, 60, 60]), torch.tensor([59, 60, 0, 1000])
    for first in (0, 40):
        out = scored(4, 100, query, weights, keys, None, None, starts, lens, first, 0)
        for t in range(4):
            part = keys[starts[t] + first : starts[t] + min(int(lens[t]), 150)][:100].float()
            expected = reference.indexer_scores(query[t : t + 1].float(), weights[t : t + 1], part)
            count = max(len(part), 0)
            assert torch.equal(out[t, :count], expected[0]), (heads, first, t)
            assert out[t, count:].isnan().all()
    fill_beyond(out, lens - 40, starts, 110)
    assert not out.isnan().any() and bool((out[2] == -float("inf")).all())

# FP8, contiguous and in pages with holes.
query, weights = integers(4, 32, 128).to(FP8), integers(4, 32)
pages = torch.cat([integers(5, 16 * 128).to(FP8).view(torch.uint8),
                   torch.exp2(integers(5, 16)).view(torch.uint8)], 1)
keys = IndexKeys.from_pages(pages, torch.tensor([[4, 0], [-1, 2147480000]]), page_size=16)
lens = torch.tensor([31, 32, 16, 17])
expected = indexer_scores_fp8(query, weights, keys, kv_lens=lens, impl="reference")
out = scored(4, 32, query, weights, keys.values, keys.scales, keys.block_tables, None, lens, 0, 16)
fill_beyond(out, lens, None, 32)
assert torch.equal(out, expected)
flat, _ = keys.dequantized()
row = IndexKeys(keys.values[4].view(16, 128), keys.scales[4])
out = scored(4, 16, query, weights, row.values, row.scales, None, None, lens, 0, 0)
assert torch.equal(out[:2], expected[:2, :16])

# Candidates carried from one chunk to the next.
chosen = torch.tensor([[1, 3, 0], [4, -1, -1], [0, 2, 1]])
scores, old = integers(3, 3), torch.tensor([[7, 9, -1], [5, 6, 8], [2, 4, -1]])
new, workspace = torch.full_like(old, 99), torch.full((3, 6), float("nan"))
carry_into(new, workspace, chosen, scores, old, 100)
assert new.tolist() == [[9, 100, 7], [101, -1, -1], [2, -1, 4]]
assert torch.equal(workspace[:, :3], scores) and workspace[:, 3:].isnan().all()
"""


def test_kernels_in_the_interpreter() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert child.returncode == 0, child.stderr[-4000:]
