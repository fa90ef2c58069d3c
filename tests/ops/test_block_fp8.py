"""Block-FP8 matrices and rows: what a scale covers, what parts may be taken, products against fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cptools.kernels.block_fp8 import BlockFP8, QuantisedRows, block_fp8_linear, quantise_rows
from cptools.kernels.rowwise import linear, rms_norm
from cptools.kernels.rowwise.norm_fp8 import rms_norm_quantise

NAN = math.nan
STEP = 2.0**-4  # half a step of e4m3, relative to a normal value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Magnitudes from 1e-6 to 1e6: a scale of the wrong block is off by orders of magnitude."""
    return normal(*shape, seed=seed) * 10.0 ** (6 * normal(*shape, seed=seed + 1)).clamp(-6, 6)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(0, 9), columns=st.integers(1, 400), seed=st.integers(0, 2**16))
def test_rows_round_to_e4m3_by_128_columns(rows: int, columns: int, seed: int) -> None:
    x = uneven(rows, columns, seed=seed)
    values, scales = quantise_rows(x)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (rows, -(-columns // 128)))
    assert rows == 0 or scales.t().is_contiguous()
    back = QuantisedRows(values, scales).dequantise()
    for block in range(scales.shape[1]):
        here = slice(128 * block, 128 * (block + 1))
        amax = x[:, here].abs().amax(1, keepdim=True) if rows else x[:, here]
        error = (back[:, here] - x[:, here]).abs()
        assert (error <= torch.maximum(x[:, here].abs(), amax / 448 * 2**-6) * STEP * (1 + 1e-5)).all()


def test_zeros_stay_zero_and_what_is_no_number_stays_visible() -> None:
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200], x[3, 0] = NAN, math.inf, 1e-30
    back = quantise_rows(x).dequantise()
    assert not back[0].any()
    assert back[1, 3].isnan()
    assert back[2, 200].isnan()
    assert not back[1:, :128][1:].any()


def test_parts_of_a_matrix_are_the_parts_of_what_it_stands_for() -> None:
    weight = BlockFP8.quantise(uneven(3, 576, 300))
    whole = weight.dequantise()
    assert torch.equal(weight[1].dequantise(), whole[1])
    assert torch.equal(weight[1:].dequantise(), whole[1:])
    assert torch.equal(weight.rows(128, 576).dequantise(), whole[:, 128:])
    assert torch.equal(weight[2].rows(128, 256).dequantise(), whole[2, 128:256])
    assert torch.equal(weight.columns(256, 300).dequantise(), whole[..., 256:])
    assert weight.rows(128, 128).shape == (3, 0, 300)
    assert torch.equal(weight.dequantise(torch.bfloat16), whole.bfloat16())


@pytest.mark.parametrize("start, stop", [(1, 128), (0, 130), (-128, 0), (128, 0), (0, 704), (512, 570)])
def test_parts_inside_a_block_are_refused(start, stop) -> None:
    weight = BlockFP8.quantise(normal(576, 128))
    with pytest.raises(ValueError, match=rf"rows {start}\.\.{stop} of 576"):
        weight.rows(start, stop)
    with pytest.raises(ValueError, match="has no experts"):
        weight[0]


@pytest.mark.parametrize(
    "values, scales, message",
    [
        (torch.zeros(2, 128), torch.ones(1, 1), "got torch.float32, torch.float32"),
        (
            torch.zeros(129, 256).to(torch.float8_e4m3fn),
            torch.ones(1, 2),
            r"\[129, 256\] must be \[2, 2\], got \[1, 2\]",
        ),
        (torch.zeros(2, 5, 5).to(torch.float8_e4m3fn), torch.ones(1, 1), r"must be \[2, 1, 1\], got \[1, 1\]"),
        (torch.zeros(5).to(torch.float8_e4m3fn), torch.ones(1), r"must be \[O, D\] or \[E, O, D\], got \[5\]"),
    ],
)
def test_what_is_no_block_fp8_matrix_is_refused(values, scales, message) -> None:
    with pytest.raises(ValueError, match=message):
        BlockFP8(values, scales)


@pytest.mark.parametrize("rows", [0, 1, 7, 67])
@pytest.mark.parametrize("outputs, columns", [(576, 384), (40, 200), (1, 1)])
def test_product_of_the_rounded_operands(rows, outputs, columns) -> None:
    x, weight = uneven(rows, columns), BlockFP8.quantise(uneven(outputs, columns, seed=5))
    out = block_fp8_linear(x, weight)
    a, b = quantise_rows(x).dequantise().double(), weight.dequantise().double()
    bound = columns * 2.0**-23 * (a.abs() @ b.t().abs())
    assert ((out.double() - a @ b.t()).abs() <= bound + 1e-30).all()
    assert torch.equal(linear(x, weight), out)
    assert torch.equal(block_fp8_linear(quantise_rows(x), weight, out_dtype=torch.float32), out)
    assert block_fp8_linear(quantise_rows(x), weight).dtype == torch.bfloat16


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    x, weight = normal(130, 300), BlockFP8.quantise(normal(70, 300, seed=1))
    alone = torch.cat([block_fp8_linear(row, weight) for row in x.split(1)])
    assert torch.equal(block_fp8_linear(x, weight), alone)


def test_rows_and_matrix_must_fit() -> None:
    with pytest.raises(ValueError, match=r"rows \[2, 5\] do not fit a weight \[3, 6\]"):
        block_fp8_linear(torch.zeros(2, 5), BlockFP8.quantise(torch.zeros(3, 6)))


def test_norm_goes_on_in_both_forms() -> None:
    x, weight = normal(5, 200), normal(200, seed=1)
    normed, quantised = rms_norm_quantise(x, weight, 1e-5)
    assert torch.equal(normed, rms_norm(x, weight, 1e-5))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(quantised, quantise_rows(normed), strict=True))
    with pytest.raises(ValueError, match=r"weight must be .* \[200\], got float32 \[5\]"):
        rms_norm_quantise(x, torch.zeros(5), 1e-5)
