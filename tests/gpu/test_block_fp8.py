"""Rows to FP8 and products with block-FP8 matrices on the GPU: bits against the reference, products against fp64."""

import math

import pytest
import torch
from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8, block_fp8_linear, choose_block_fp8_linear, quantise_rows, reference
from cptools.kernels.rowwise import rms_norm, silu
from cptools.kernels.rowwise.norm_fp8 import rms_norm_quantise

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAN, INF = math.nan, math.inf


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Magnitudes from 1e-6 to 1e6: a scale of the wrong block is off by orders of magnitude."""
    torch.manual_seed(seed)
    return torch.randn(*shape, device=CUDA) * 10.0 ** (2 * torch.randn(*shape, device=CUDA)).clamp(-6, 6)


def assert_same_bits(values: Tensor, scales: Tensor, expected: reference.QuantisedRows) -> None:
    assert scales.t().shape == expected.scales.shape
    assert torch.equal(scales.t().nan_to_num(7.0), expected.scales.nan_to_num(7.0))
    wide, wanted = values.float(), expected.values.float()
    assert torch.equal(wide.isnan(), wanted.isnan())
    assert torch.equal(wide.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, columns", [(0, 128), (1, 6144), (3, 576), (130, 2048), (67, 1), (5, 200)])
def test_rows_have_the_bits_of_the_reference(rows, columns, dtype) -> None:
    from cptools.kernels.block_fp8 import triton

    x = uneven(rows, columns + 8).to(dtype)[:, :columns]
    if rows > 2:
        x[0], x[1, 0], x[2, -1] = 0.0, NAN, INF
        x[2, 0] = -NAN
    assert_same_bits(*triton.quantise(x, False), reference.quantise_rows(x))


@pytest.mark.parametrize("rows", [1, 77])
def test_gated_rows_round_as_their_product(rows) -> None:
    from cptools.kernels.block_fp8 import triton

    x = 3 * torch.randn(rows, 2 * 384, device=CUDA).bfloat16()
    values, scales = triton.quantise(x, True)
    gate, up = x.float().chunk(2, 1)
    expected = silu(gate) * up
    block = expected.view(rows, 3, 128).abs().amax(2)
    torch.testing.assert_close(scales.t(), block / 448, rtol=1e-5, atol=0)
    back = reference.QuantisedRows(values, scales.t()).dequantise()
    bound = torch.maximum(expected.abs(), block.repeat_interleave(128, 1) / 448 * 2**-6) / 16 * 1.001
    assert ((back - expected).abs() <= bound).all()


@pytest.mark.parametrize("rows, columns", [(0, 256), (1, 6144), (33, 2048), (4, 200)])
def test_norm_and_quantise(rows, columns) -> None:
    x, weight = torch.randn(rows, columns, device=CUDA).bfloat16(), torch.randn(columns, device=CUDA).bfloat16()
    normed, quantised = rms_norm_quantise(x, weight, 1e-5, impl="triton")
    torch.testing.assert_close(normed, rms_norm(x, weight, 1e-5), rtol=2**-6, atol=1e-6)
    assert_same_bits(quantised.values, quantised.scales.t(), reference.quantise_rows(normed))


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 65, 200, 301])
@pytest.mark.parametrize("outputs, columns", [(576, 6144), (1, 128), (1000, 384), (4096, 2048)])
def test_product_of_the_rounded_operands(rows, outputs, columns) -> None:
    x, weight = uneven(rows, columns).bfloat16(), BlockFP8.quantise(uneven(outputs, columns, seed=5))
    assert choose_block_fp8_linear(x, weight).impl == ("scaled_mm" if rows == 200 and columns > 384 else "gluon")
    seen, wide = quantise_rows(x).dequantise().double(), weight.dequantise().double()
    want, size = seen @ wide.t(), seen.abs() @ wide.abs().t()
    out = block_fp8_linear(x, weight, out_dtype=torch.float32, impl="gluon")
    # The matrix unit adds 32 products at once and keeps 13 bits behind the largest of them.
    assert ((out.double() - want).abs() <= 2**-8 * size).all()
    assert rows == 0 or float((out.double() - want).norm() / want.norm()) < 2e-3
    assert torch.equal(block_fp8_linear(quantise_rows(x), weight, impl="gluon"), out.bfloat16())
    assert torch.equal(block_fp8_linear(x, weight, impl="gluon"), out.bfloat16())
    if choose_block_fp8_linear(x, weight).impl == "scaled_mm":
        own = block_fp8_linear(x, weight).double()
        assert ((own - want).abs() <= 2**-8 * (size + want.abs())).all()


def test_parts_of_a_matrix_and_what_is_not_served() -> None:
    x, whole = torch.randn(5, 512, device=CUDA).bfloat16(), BlockFP8.quantise(torch.randn(576, 512, device=CUDA))
    expected = block_fp8_linear(x, whole, out_dtype=torch.float32)
    lower = block_fp8_linear(x, whole.rows(256, 576), out_dtype=torch.float32, impl="gluon")
    torch.testing.assert_close(lower, expected[:, 256:], rtol=1e-5, atol=1e-4)
    left = whole.columns(0, 256)
    assert "strided" in str(choose_block_fp8_linear(x, left).fallback_reason)
    dense = BlockFP8(left.values.contiguous(), left.scales.contiguous())
    torch.testing.assert_close(
        block_fp8_linear(x[:, :256], left), block_fp8_linear(x[:, :256], dense, impl="gluon"), rtol=2**-7, atol=0.1
    )


def test_graph_replays_on_changed_contents() -> None:
    x, weight = torch.randn(4, 1024, device=CUDA).bfloat16(), BlockFP8.quantise(torch.randn(300, 1024, device=CUDA))
    block_fp8_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_fp8_linear(x, weight)
    for _ in range(2):
        x.normal_()
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, block_fp8_linear(x, weight))
        want = block_fp8_linear(x, weight, impl="reference")
        torch.testing.assert_close(out.float(), want.float(), rtol=2**-7, atol=0.05)


def test_opcheck_of_quantise() -> None:
    from cptools.kernels.block_fp8 import triton

    x = torch.randn(3, 256, device=CUDA).bfloat16()
    torch.library.opcheck(triton.quantise, (x, False))
    torch.library.opcheck(triton.quantise, (x.view(3, 1, 256), True))
    torch.library.opcheck(triton.rms_norm_quantise, (x, torch.ones(256, device=CUDA).bfloat16(), 1e-5))


def test_opcheck_of_linear() -> None:
    from cptools.kernels.block_fp8 import gluon

    rows, weight = (
        quantise_rows(torch.randn(3, 256, device=CUDA)),
        BlockFP8.quantise(torch.randn(130, 256, device=CUDA)),
    )
    operands = (rows.values, rows.scales.t(), weight.values, weight.scales, torch.bfloat16)
    # Its comparison of inputs before and after is not made for FP8.
    without_schema = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(gluon.linear, operands, test_utils=without_schema)
