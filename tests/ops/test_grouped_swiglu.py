"""Experts over grouped rows: against the formula in fp64, bit by bit against one expert at a time."""

import math

import pytest
import torch
from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8, quantise_rows
from cptools.kernels.grouped_swiglu import dense_swiglu, grouped_swiglu
from cptools.kernels.rowwise import swiglu

EXPERTS, HIDDEN, WIDTH = 5, 48, 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


GATE_UP, DOWN = normal(EXPERTS, 2 * WIDTH, HIDDEN, seed=1), normal(EXPERTS, HIDDEN, WIDTH, seed=2)


@pytest.mark.parametrize("counts", [[3, 0, 70, 1, 5], [0, 0, 0, 0, 0], [0, 0, 0, 0, 67], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_expert_has_its_own_rows(counts, dtype) -> None:
    x = 7 * normal(sum(counts) + 2, HIDDEN)
    x[sum(counts) :] = math.nan  # rows of nobody
    out = grouped_swiglu(x, torch.tensor(counts, dtype=dtype), GATE_UP, DOWN)
    assert out.shape == x.shape
    start = 0
    for expert, size in enumerate(counts):
        rows = slice(start, start + size)
        gate, up = (x[rows].double() @ half.double().t() for half in GATE_UP[expert].chunk(2))
        expected = (torch.nn.functional.silu(gate) * up) @ DOWN[expert].double().t()
        assert torch.allclose(out[rows].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(out[rows], swiglu(x[rows], *GATE_UP[expert].chunk(2), DOWN[expert]))
        start += size


def test_block_fp8_experts_round_rows_and_activations() -> None:
    experts, hidden, width = 3, 256, 128
    gate_up = BlockFP8.quantise(normal(experts, 2 * width, hidden, seed=3))
    down = BlockFP8.quantise(normal(experts, hidden, width, seed=4))
    x = 20 * normal(9, hidden)
    out = grouped_swiglu(x, torch.tensor([4, 0, 5]), gate_up, down)
    for expert, rows in ((0, slice(0, 4)), (2, slice(4, 9))):
        seen = quantise_rows(x[rows]).dequantise().double()
        gate, up = (seen @ gate_up.dequantise()[expert].double().t()).chunk(2, dim=1)
        inner = quantise_rows((torch.nn.functional.silu(gate) * up).float()).dequantise().double()
        expected = inner @ down.dequantise()[expert].double().t()
        # A value that lies on the edge between two e4m3 values may round otherwise than in fp64.
        assert float((out[rows] - expected).norm() / expected.norm()) < 1e-2
        assert torch.equal(out[rows], dense_swiglu(x[rows], gate_up[expert], down[expert]))
    alone = torch.cat([grouped_swiglu(row, torch.tensor([0, 0, 1]), gate_up, down) for row in x[4:].split(1)])
    assert torch.equal(out[4:], alone)


@pytest.mark.parametrize(
    "x, counts, message",
    [
        ((3, HIDDEN + 1), EXPERTS, r"x \[3, 49\], gate_up \[5, 80, 48\], down \[5, 48, 40\] do not fit"),
        ((3, HIDDEN), EXPERTS - 1, r"counts must be \[5\], got \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused(x, counts, message) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_swiglu(torch.zeros(*x), torch.zeros(counts, dtype=torch.int64), GATE_UP, DOWN)
    with pytest.raises(ValueError, match=r"down \[5, 48, 40\] do not fit"):
        dense_swiglu(torch.zeros(3, HIDDEN), GATE_UP[0], DOWN)
