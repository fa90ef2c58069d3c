"""Kernels around the experts under Triton's interpreter: lists of tiles, sums of parts, combination, without a GPU.

The interpreter must be chosen before triton is imported, so the checks run in a process of their own. It rounds wrongly
to FP8, so quantisation is left to tests/gpu.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs triton")


def check_tiles() -> None:
    import torch

    from cptools.kernels.grouped_swiglu import triton

    rows = triton.TILE_ROWS
    for sizes in ([3, 0, 2 * rows, rows + 1, 1], [0, 0], [0, 5 * rows - 1, 0], [1] * 70, [0] * 40 + [7]):
        total = sum(sizes)
        for dtype in (torch.int32, torch.int64):
            x = torch.zeros(total + 9, 128)
            table, count, most, _, _ = triton.prepare(torch.tensor(sizes, dtype=dtype), x, None, quantise=False)
            expected = []
            for expert, size in enumerate(sizes):
                first = sum(sizes[:expert])
                expected += [(expert, first + at, min(rows, size - at)) for at in range(0, size, rows)]
            assert int(count) == len(expected) <= most == table.shape[0]
            assert table[: len(expected)].tolist() == [list(tile) for tile in expected]


def check_sums() -> None:
    import torch

    from cptools.kernels.block_fp8 import triton as block_fp8
    from cptools.kernels.expert_routing import reference
    from cptools.kernels.expert_routing import triton as routing

    parts = torch.randn(3, 17, 31)
    out = torch.full((17, 31), torch.nan)
    block_fp8.add_parts(parts, out)
    assert torch.equal(out, parts[0] + parts[1] + parts[2])
    outputs, gates = torch.randn(40, 1030), torch.rand(5, 8)
    outputs[7] = torch.nan  # a row of nobody
    slots = torch.tensor([row for row in torch.randperm(41).tolist() if row not in (7, 40)] + [3]).view(5, 8)
    combined = routing.combine(outputs, slots, gates)
    torch.testing.assert_close(combined, reference.combine(outputs, slots, gates), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check", ["check_tiles", "check_sums"])
def test_under_the_interpreter(check) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"from tests.kernels.test_experts_interpreter import {check}; {check}()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
