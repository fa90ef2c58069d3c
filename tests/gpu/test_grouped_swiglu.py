"""Experts on the GPU, grouped and alone, against each expert in fp64 over the operands that it sees."""

import math

import pytest
import torch
from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8, quantise_rows
from cptools.kernels.grouped_swiglu import choose_dense_swiglu, choose_grouped_swiglu, dense_swiglu, grouped_swiglu
from cptools.kernels.rowwise import silu

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAN = math.nan
EXPERTS, HIDDEN, WIDTH = 9, 384, 256
COUNTS = {
    "each one": [1] * 9,
    "one has all": [0, 0, 0, 301, 0, 0, 0, 0, 0],
    "nobody": [0] * 9,
    "mixed": [0, 3, 64, 65, 128, 129, 0, 200, 1],
    "last only": [0] * 8 + [7],
}


def block_weights(uneven: bool = False) -> tuple[BlockFP8, BlockFP8]:
    """Random matrices; uneven: the scales of neighbouring blocks differ by up to 1e4."""
    torch.manual_seed(1)
    weights = []
    for outputs, columns in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        weight = BlockFP8.quantise(torch.randn(EXPERTS, outputs, columns, device=CUDA) * columns**-0.5)
        if uneven:
            factor = 10.0 ** (4 * torch.rand_like(weight.scales) - 2)
            weight = BlockFP8(weight.values, weight.scales * factor)
        weights.append(weight)
    return weights[0], weights[1]


def plain_weights() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=CUDA) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, device=CUDA) * WIDTH**-0.5
    return gate_up.bfloat16(), down.bfloat16()


def expected(
    x: Tensor, counts: list[int], gate_up: BlockFP8 | Tensor, down: BlockFP8 | Tensor
) -> tuple[Tensor, Tensor]:
    """In fp64 over the rounded operands, and what rounding of the values between the products may add to it."""
    fp8 = isinstance(gate_up, BlockFP8)
    seen = quantise_rows(x).dequantise().double() if fp8 else x.double()
    up_all = gate_up.dequantise().double() if isinstance(gate_up, BlockFP8) else gate_up.double()
    down_all = down.dequantise().double() if isinstance(down, BlockFP8) else down.double()
    out, bound = torch.zeros_like(seen), torch.zeros_like(seen)
    start = 0
    for expert, size in enumerate(counts):
        rows = slice(start, start + size)
        start += size
        if not size:
            continue
        gate, up = (seen[rows] @ up_all[expert].t()).chunk(2, 1)
        inner = silu(gate) * up
        error = inner.abs() * 2**-8
        if fp8:
            # Half a step of e4m3 relative to the value, or to the smallest normal one of its 128 columns; and the
            # matrix unit keeps about 14 bits of a sum of products.
            unit = inner.abs().view(size, -1, 128).amax(2).repeat_interleave(128, 1) / 448
            size_of = seen[rows].abs() @ up_all[expert].abs().t()
            first, second = size_of.chunk(2, 1)
            fuzz = 2**-10 * (first * up.abs() + second * gate.abs() + 2**-10 * first * second)
            error = torch.maximum(inner.abs(), unit * 2**-6) / 16 + fuzz * 1.1
        out[rows] = inner @ down_all[expert].t()
        bound[rows] = error @ down_all[expert].abs().t() + inner.abs() @ down_all[expert].abs().t() * 2**-10
    return out, bound + out.abs() * 2**-8


def check(x: Tensor, counts: list[int], weights: tuple, **kwargs) -> Tensor:
    total = sum(counts)
    out = grouped_swiglu(x, torch.tensor(counts, device=CUDA), *weights, impl="gluon", **kwargs)
    rows = x if "source" not in kwargs else x[kwargs["source"]]
    assert out.shape == rows.shape
    want, bound = expected(rows[:total], counts, *weights)
    worst = (out[:total].double() - want).abs() / bound.clamp(min=1e-300)
    assert (worst <= 1).all(), float(worst.max())
    if total:
        assert float((out[:total].double() - want).norm() / want.norm()) < 0.05
    return out


def rows_with_strangers(total: int, dtype: torch.dtype) -> Tensor:
    """Rows of uneven magnitude, then some of nobody that hold NaN."""
    torch.manual_seed(3)
    x = torch.randn(total + 3, HIDDEN, device=CUDA) * 10.0 ** torch.randn(total + 3, 1, device=CUDA).clamp(-2, 2)
    x[total:] = NAN
    return x.to(dtype)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kind", ["fp8", "fp8 uneven", "bf16"])
def test_each_expert_has_its_own_rows(counts, kind) -> None:
    weights = plain_weights() if kind == "bf16" else block_weights(kind == "fp8 uneven")
    x = rows_with_strangers(sum(counts), torch.bfloat16)
    assert choose_grouped_swiglu(x, *weights).impl == "gluon"
    first = check(x, counts, weights)
    again = check(x, counts, weights)
    assert torch.equal(first[: sum(counts)], again[: sum(counts)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_other_dtypes(dtype) -> None:
    counts = COUNTS["mixed"]
    assert check(rows_with_strangers(sum(counts), dtype), counts, block_weights()).dtype == dtype


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_rows_picked_from_tokens(kind) -> None:
    counts = COUNTS["mixed"]
    x = rows_with_strangers(50, torch.bfloat16)
    source = torch.randint(0, 50, (sum(counts),), device=CUDA)
    weights = plain_weights() if kind == "bf16" else block_weights()
    picked = check(x, counts, weights, source=source)
    assert torch.equal(picked, check(x[source], counts, weights))


def test_no_rows_and_refusals() -> None:
    gate_up, down = block_weights()
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device=CUDA)
    assert grouped_swiglu(torch.empty(0, HIDDEN, device=CUDA), counts, gate_up, down, impl="gluon").shape == (0, HIDDEN)
    x = torch.zeros(4, 2 * HIDDEN, device=CUDA)[:, :HIDDEN]
    assert "strided" in str(choose_grouped_swiglu(x, gate_up, down).fallback_reason)
    assert "other is not" in str(choose_grouped_swiglu(x, gate_up, down.dequantise()).fallback_reason)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_the_width_of_the_model_and_many_experts(kind) -> None:
    """More jobs than programs, and an odd number of blocks in the last part of the outputs."""
    experts, hidden, width = 70, 6144 + 128, 512
    torch.manual_seed(4)
    gate_up = torch.randn(experts, 2 * width, hidden, device=CUDA) * hidden**-0.5
    down = torch.randn(experts, hidden, width, device=CUDA) * width**-0.5
    weights = (gate_up.bfloat16(), down.bfloat16())
    if kind == "fp8":
        weights = (BlockFP8.quantise(gate_up), BlockFP8.quantise(down))
    counts = torch.randint(0, 150, (experts,), device=CUDA).tolist()
    x = torch.randn(sum(counts), hidden, device=CUDA).bfloat16()
    check(x, counts, weights)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_graph_replays_on_changed_counts(kind) -> None:
    weights = plain_weights() if kind == "bf16" else block_weights()
    x = torch.randn(320, HIDDEN, device=CUDA).bfloat16()
    counts = torch.tensor(COUNTS["mixed"], device=CUDA, dtype=torch.int32)
    counts[7] = 0
    grouped_swiglu(x, counts, *weights, impl="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_swiglu(x, counts, *weights, impl="gluon")
    for now in ([0, 0, 0, 301, 0, 0, 0, 0, 0], [1] * 9, [0] * 9, [20, 30, 0, 100, 70, 0, 64, 0, 36]):
        counts.copy_(torch.tensor(now))
        x.normal_()
        out.fill_(NAN)
        graph.replay()
        want, bound = expected(x[: sum(now)], now, *weights)
        assert ((out[: sum(now)].double() - want).abs() <= bound).all()


@pytest.mark.parametrize("rows", [0, 1, 65, 700])
def test_one_expert_over_all_rows(rows) -> None:
    """Few rows split the depth of both products, many take the fused one."""
    hidden, width = 2048, 1024 if rows < 700 else 4096
    torch.manual_seed(rows)
    gate_up = BlockFP8.quantise(torch.randn(2 * width, hidden, device=CUDA) * hidden**-0.5)
    down = BlockFP8.quantise(torch.randn(hidden, width, device=CUDA) * width**-0.5)
    x = torch.randn(rows, hidden, device=CUDA).bfloat16()
    assert choose_dense_swiglu(x, gate_up, down).impl == "gluon"
    out = dense_swiglu(x, gate_up, down, impl="gluon")
    stacks = [BlockFP8(w.values[None], w.scales[None]) for w in (gate_up, down)]
    want, bound = expected(x, [rows], *stacks)
    assert ((out.double() - want).abs() <= bound).all()
    assert torch.equal(dense_swiglu(x, gate_up, down), out)


def test_opcheck() -> None:
    from cptools.kernels.grouped_swiglu import gluon

    counts = torch.tensor(COUNTS["each one"], device=CUDA, dtype=torch.int32)
    x = torch.randn(9, HIDDEN, device=CUDA).bfloat16()
    gate_up, down = block_weights()
    # Its comparison of inputs before and after is not made for FP8.
    without_schema = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    fp8 = (gate_up.values, gate_up.scales, down.values, down.scales)
    torch.library.opcheck(gluon.grouped_swiglu_fp8, (x, None, counts, *fp8), test_utils=without_schema)
    one = (gate_up.values[0], gate_up.scales[0], down.values[0], down.scales[0])
    torch.library.opcheck(gluon.dense_swiglu_fp8, (x, *one), test_utils=without_schema)
    torch.library.opcheck(gluon.grouped_swiglu_bf16, (x, torch.arange(9, device=CUDA), counts, *plain_weights()))
