"""Row-wise operations against fp64 within the bound of their rounding, and their batch invariance bit by bit."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cptools.kernels.rowwise import (
    ROW_TILE,
    RopeAngles,
    head_linear,
    layer_norm,
    linear,
    linear_in_fp32,
    rms_norm,
    rope_interleaved,
    silu,
    sum_columns,
    swiglu,
)

INF, NAN = math.inf, math.nan
ULP = 2.0**-23  # of fp32
ROWS = 200
SetThreads = Callable[[int], None]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """|actual - expected| <= bound, elementwise in fp64; NaN anywhere fails."""
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), float((error - bound).max())


def unaligned(x: Tensor) -> Tensor:
    """The same values, starting one element after an aligned address."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype)
    assert buffer.data_ptr() % 64 == 0
    moved = buffer[1:].view(x.shape)
    return moved.copy_(x)


def strided(x: Tensor) -> Tensor:
    """The same values, every second element of a row of a wider tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), NAN, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def assert_rows_stand_alone(op: Callable[[Tensor], Tensor], x: Tensor, set_threads: SetThreads) -> None:
    """A row's bits are those it has alone: in any batch, at any place, from any memory, with one or two threads."""
    assert x.shape[0] == ROWS
    set_threads(1)
    alone = torch.cat([op(row) for row in x.split(1)])
    assert alone.isfinite().all()
    for rows in (2, ROW_TILE - 1, ROW_TILE, ROW_TILE + 1, ROWS):
        for start in {0, min(1, ROWS - rows), min(37, ROWS - rows), ROWS - rows}:
            assert torch.equal(op(x[start : start + rows]), alone[start : start + rows]), (rows, start)
    for threads in (1, 2):
        set_threads(threads)
        assert torch.equal(op(x[-1:]), alone[-1:]), threads
        assert torch.equal(op(x.flip(0)), alone.flip(0)), threads
        assert torch.equal(op(unaligned(x)), alone), threads
        assert torch.equal(op(unaligned(x[:3])), alone[:3]), threads
        assert torch.equal(op(strided(x)), alone), threads


# (input width, output width). MKL has kernels of their own for up to 11 outputs; they want inputs of 4n floats.
WIDTHS = [(33, 33), (33, 1), (100, 7), (257, 64), (576, 100), (576, 512), (1024, 2), (100, 576), (64, 257), (6144, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, out", WIDTHS)
def test_linear_is_batch_invariant(width, out, dtype, set_threads) -> None:
    weight = normal(out, width, seed=1, dtype=dtype)
    assert_rows_stand_alone(lambda x: linear(x, weight), normal(ROWS, width, seed=2, dtype=dtype), set_threads)


@pytest.mark.parametrize("width, out", [(4, 2), (36, 3), (100, 4), (100, 5), (36, 8), (256, 11), (4, 12)])
def test_narrow_products_of_aligned_width_are_batch_invariant(width, out, set_threads) -> None:
    weight, matrices = normal(out, width, seed=3), normal(2, 4 * out, width, seed=4)
    x = normal(ROWS, width, seed=5)
    assert_rows_stand_alone(lambda x: linear(x, weight), x, set_threads)
    by_head = normal(ROWS, 2 * width, seed=6)
    assert_rows_stand_alone(
        lambda x: head_linear(x.unflatten(1, (2, width)), matrices.transpose(1, 2)).flatten(1), by_head, set_threads
    )


@pytest.mark.parametrize("heads, width, out", [(1, 100, 33), (3, 100, 33), (4, 192, 64), (2, 257, 100), (64, 16, 8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_head_linear_is_batch_invariant(heads, width, out, transposed, set_threads) -> None:
    weight = normal(heads, out, width, seed=7).transpose(1, 2)
    weight = weight if transposed else weight.contiguous()
    assert_rows_stand_alone(
        lambda x: head_linear(x.unflatten(1, (heads, width)), weight).flatten(1),
        normal(ROWS, heads * width, seed=8),
        set_threads,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [33, 100, 257, 576])
def test_norms_are_batch_invariant(width, dtype, set_threads) -> None:
    weight, bias = normal(width, seed=9, dtype=dtype), normal(width, seed=10, dtype=dtype)
    x = normal(ROWS, width, seed=11, dtype=dtype)
    assert_rows_stand_alone(lambda x: rms_norm(x, weight, 1e-5), x, set_threads)
    assert_rows_stand_alone(lambda x: layer_norm(x, weight, bias, 1e-6), x, set_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, inner", [(33, 77), (100, 33), (257, 100), (576, 64)])
def test_swiglu_is_batch_invariant(width, inner, dtype, set_threads) -> None:
    gate, up = (normal(inner, width, seed=seed, dtype=dtype) for seed in (12, 13))
    down = normal(width, inner, seed=14, dtype=dtype)
    assert_rows_stand_alone(lambda x: swiglu(x, gate, up, down), normal(ROWS, width, seed=15, dtype=dtype), set_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 33, 100])
def test_silu_is_batch_invariant(width, dtype, set_threads) -> None:
    """Its tail of less than a vector has the bits of its body; torch.sigmoid's has not."""
    assert_rows_stand_alone(silu, 5 * normal(ROWS, width, seed=45, dtype=dtype), set_threads)


@pytest.mark.parametrize("dim", [2, 6, 10, 64])
def test_rope_is_batch_invariant(dim, set_threads) -> None:
    positions = torch.randint(0, 1_048_576, (ROWS,), generator=torch.Generator().manual_seed(16))
    x = normal(ROWS, 3, dim, seed=17)

    def rotate(rows: Tensor) -> Tensor:
        """rows [T, 1 + 3 * dim]: the index of a position, then the values."""
        angles = RopeAngles.at(positions[rows[:, 0].long()], dim, 8e6)
        return rope_interleaved(rows[:, 1:].unflatten(1, (3, dim)), angles).flatten(1)

    rows = torch.cat([torch.arange(ROWS).float().unsqueeze(1), x.flatten(1)], 1)
    assert_rows_stand_alone(rotate, rows, set_threads)


@pytest.mark.parametrize("width", [1, 33, 100])
def test_sum_columns_is_batch_invariant(width, set_threads) -> None:
    x = normal(ROWS, 5 * width, seed=18)
    assert_rows_stand_alone(lambda x: sum_columns(x.unflatten(1, (5, width))), x, set_threads)


def operations(width: int) -> dict[str, Callable[[Tensor], Tensor]]:
    square, vector = normal(width, width, seed=19), normal(width, seed=20)
    return {
        "linear": lambda x: linear(x, square),
        "head_linear": lambda x: head_linear(x.unsqueeze(1), square.unsqueeze(0)).squeeze(1),
        "rms_norm": lambda x: rms_norm(x, vector, 1e-5),
        "layer_norm": lambda x: layer_norm(x, vector, vector, 1e-5),
        "swiglu": lambda x: swiglu(x, square, square, square),
        "silu": silu,
        "sum_columns": lambda x: sum_columns(x.unsqueeze(1)),
    }


@pytest.mark.parametrize("name", operations(4))
@pytest.mark.parametrize("poison", [NAN, INF])
def test_nan_in_one_row_of_a_tile_stays_there(name, poison) -> None:
    """Rows 0..126 are unchanged bit by bit when row 127 is poisoned (field case B6)."""
    op, x = operations(48)[name], normal(128, 48, seed=21)
    clean = op(x)
    x[127, 5] = poison
    poisoned = op(x)
    assert torch.equal(poisoned[:127], clean[:127])
    assert not poisoned[127].isfinite().all()


@pytest.mark.parametrize("name", operations(4))
def test_no_row(name) -> None:
    assert operations(48)[name](torch.empty(0, 48)).shape == (0, 48)


@pytest.mark.parametrize("name", operations(4))
def test_arguments_are_not_written(name) -> None:
    x = normal(70, 48, seed=22)
    before = x.clone()
    operations(48)[name](x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("width, out", [*WIDTHS, (1, 1), (33, 7)])
def test_linear_in_fp64(width, out) -> None:
    x, weight = normal(70, width, seed=23), normal(out, width, seed=24)
    expected = x.double() @ weight.double().t()
    assert_within(linear(x, weight), expected, width * ULP * (x.double().abs() @ weight.double().abs().t()))
    x, weight = x.bfloat16(), weight.bfloat16()
    expected = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    result = linear(x, weight)
    assert result.dtype == torch.bfloat16
    assert_within(result, expected, 2.0**-8 * expected.abs() + width * ULP * magnitude)


@pytest.mark.parametrize("heads, width, out", [(1, 100, 33), (4, 192, 64), (3, 33, 7)])
def test_head_linear_in_fp64(heads, width, out) -> None:
    """Each head its own matrix, whatever the strides."""
    x, weight = normal(70, heads, width, seed=25), normal(heads, width, out, seed=26)
    expected = torch.stack([x[:, h].double() @ weight[h].double() for h in range(heads)], 1)
    magnitude = torch.stack([x[:, h].double().abs() @ weight[h].double().abs() for h in range(heads)], 1)
    for view in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_within(head_linear(x, view), expected, width * ULP * magnitude)
        assert_within(
            head_linear(x.transpose(0, 1).contiguous().transpose(0, 1), view), expected, width * ULP * magnitude
        )


@pytest.mark.parametrize("width", [1, 33, 257, 576])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e15])
def test_rms_norm_in_fp64(width, size) -> None:
    x, weight = normal(70, width, seed=27) * size, normal(width, seed=28)
    x[3] = 0.0
    wide = x.double()
    expected = weight.double() * wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert_within(rms_norm(x, weight, 1e-5), expected, 8 * ULP * expected.abs())
    assert not rms_norm(x, weight, 1e-5)[3].any()


def test_rms_norm_of_bf16_is_float32_inside() -> None:
    x, weight = normal(70, 576, seed=29, dtype=torch.bfloat16), normal(576, seed=30, dtype=torch.bfloat16)
    wide = x.double()
    expected = weight.double() * wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == torch.bfloat16
    assert_within(result, expected, 2.01 * 2.0**-8 * expected.abs())  # rounded before and after the weight


@pytest.mark.parametrize("width", [33, 257, 576])
def test_layer_norm_in_fp64(width) -> None:
    x, weight, bias = 3 * normal(70, width, seed=31) + 5, normal(width, seed=32), normal(width, seed=33)
    x[3] = 7.0
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = weight.double() * scaled + bias.double()
    # The mean is rounded to an ulp of itself, which the scale of the row then multiplies.
    factor = 1 / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
    mean_error = 8 * ULP * wide.abs().mean(-1, keepdim=True) * factor * weight.double().abs()
    assert_within(
        layer_norm(x, weight, bias, 1e-6), expected, mean_error + 8 * ULP * (expected.abs() + bias.double().abs())
    )


@pytest.mark.parametrize("width, inner", [(33, 77), (100, 33), (64, 5)])
def test_swiglu_in_fp64(width, inner) -> None:
    x = normal(70, width, seed=34)
    gate, up, down = normal(inner, width, seed=35), normal(inner, width, seed=36), normal(width, inner, seed=37)
    a, b = x.double() @ gate.double().t(), x.double() @ up.double().t()
    expected = (a * torch.sigmoid(a) * b) @ down.double().t()
    # |silu'| <= 1.1, and each product of width terms carries its own bound.
    a_error = width * ULP * (x.double().abs() @ gate.double().abs().t())
    b_error = width * ULP * (x.double().abs() @ up.double().abs().t())
    hidden_error = 1.1 * a_error * b.abs() + a.abs() * b_error + 8 * ULP * (a * b).abs()
    bound = hidden_error @ down.double().abs().t() + inner * ULP * ((a * b).abs() @ down.double().abs().t())
    assert_within(swiglu(x, gate, up, down), expected, bound)


def test_silu_in_fp64() -> None:
    x = torch.cat([normal(5000, seed=38) * 10, torch.linspace(-88, 88, 1001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    expected = x.double() * torch.sigmoid(x.double())
    assert_within(silu(x), expected, 4 * ULP * expected.abs() + 2.0**-149)


def test_silu_at_its_ends() -> None:
    """exp(-x) overflows below -88.7: the result must be 0, not NaN."""
    x = torch.tensor([-1e4, -100.0, -89.0, 89.0, 1e4, 3e38, INF])
    result = silu(x)
    assert (result[:3].abs() <= 1e-36).all()
    assert torch.equal(result[3:], x[3:])
    assert silu(torch.tensor([NAN])).isnan().all()


def test_sum_columns_adds_left_to_right() -> None:
    x = normal(9, 8, 5, seed=39) * 10 ** torch.linspace(-4, 4, 8).view(1, 8, 1)
    total = x[:, 0].numpy().copy()
    for column in range(1, 8):
        total = np.add(total, x[:, column].numpy(), dtype=np.float32)
    assert np.array_equal(sum_columns(x).numpy(), total)
    assert torch.equal(sum_columns(x[:, :1]), x[:, 0])


def test_sum_columns_order_is_visible() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32 from the left and 1 in any better order."""
    assert sum_columns(torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0]])).tolist() == [0.0, 1.0]


def rotated(x: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """(x rotated as complex numbers in fp64, what fp32 angles may be off by), x [T, ..., D]."""
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = (positions.double().unsqueeze(1) * frequencies).view(len(positions), *[1] * (x.dim() - 2), dim // 2)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (dim // 2, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    # The frequency is rounded (its exponent too, hence the logarithm), and so is its product with the position.
    angle_error = angles * (2 + math.log(theta)) * ULP + 2 * ULP
    return turned, (pairs.abs() * angle_error).repeat_interleave(2, -1) + 4 * ULP * x.double().abs().amax()


@pytest.mark.parametrize("dim", [2, 6, 64])
@pytest.mark.parametrize("theta", [1e4, 8e6])
def test_rope_turns_complex_numbers(dim, theta) -> None:
    """Pairs (2i, 2i + 1), in place, up to the last position of a million-token context."""
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 4095, 65_537, 524_287, 1_048_575] * 8)
    for shape in ((len(positions), dim), (len(positions), 3, dim)):
        x = normal(*shape, seed=40)
        expected, bound = rotated(x, positions, theta)
        assert_within(rope_interleaved(x, RopeAngles.at(positions, dim, theta)), expected, bound)


def test_rope_at_the_last_position_is_not_the_one_before() -> None:
    """Neighbouring positions stay a radian apart in the fastest pair at 1,048,575."""
    angles = RopeAngles.at(torch.tensor([1_048_574, 1_048_575]), 64, 8e6)
    turn = torch.atan2(angles.sin[:, 0].double(), angles.cos[:, 0].double())
    assert float((turn[1] - turn[0]) % (2 * math.pi)) == pytest.approx(1.0, abs=1e-6)
    assert float(turn[1] % (2 * math.pi)) == pytest.approx(1_048_575 % (2 * math.pi), abs=1e-6)


def test_rope_at_position_zero_changes_nothing() -> None:
    x = normal(5, 64, seed=41)
    assert torch.equal(rope_interleaved(x, RopeAngles.at(torch.zeros(5, dtype=torch.int64), 64, 1e4)), x)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = normal(1, 64, seed=42), normal(1, 64, seed=43)

    def score(query_at: int, key_at: int) -> float:
        turned = [
            rope_interleaved(x, RopeAngles.at(torch.tensor([at]), 64, 1e4)) for x, at in ((q, query_at), (k, key_at))
        ]
        return float((turned[0].double() * turned[1].double()).sum())

    assert score(17, 12) == pytest.approx(score(1005, 1000), abs=1e-3)
    assert score(17, 12) != pytest.approx(score(17, 13), abs=1e-3)


def test_angles_of_some_rows() -> None:
    angles = RopeAngles.at(torch.arange(100), 16, 1e4)
    some = angles[30:40]
    assert torch.equal(some.cos, angles.cos[30:40])
    assert torch.equal(some.sin, angles.sin[30:40])
    assert angles.cos.dtype == angles.sin.dtype == torch.float32
    assert angles.cos.shape == (100, 8)


def test_rope_of_bf16_stays_bf16() -> None:
    positions = torch.arange(70)
    x = normal(70, 2, 16, seed=44, dtype=torch.bfloat16)
    result = rope_interleaved(x, RopeAngles.at(positions, 16, 1e4))
    expected, _ = rotated(x, positions, 1e4)
    assert result.dtype == torch.bfloat16
    assert_within(result, expected, 2.0**-6 * x.double().abs().amax())


def test_wrong_shapes_raise_with_the_numbers() -> None:
    x = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=r"linear: rows must be \[T, 4\], got \(3, 5\)"):
        linear(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"linear: rows must be \[T, 5\], got \(1, 3, 5\)"):
        linear(x.unsqueeze(0), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"head_linear: x must be \[T, 2, 4\], got \(3, 5\)"):
        head_linear(x, torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match=r"head_linear: x must be \[T, 2, 5\], got \(3, 1, 5\)"):
        head_linear(x.unsqueeze(1), torch.zeros(2, 5, 6))
    with pytest.raises(ValueError, match=r"out must be torch.float32 \(3, 1, 6\), got torch.float32 \(3, 6\)"):
        head_linear(x.unsqueeze(1), torch.zeros(1, 5, 6), out=torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"rms_norm: weight must be .* \[5\], got float32 \[4\]"):
        rms_norm(x, torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match=r"layer_norm: weight must be .* \[5\], got float32 \[4\]"):
        layer_norm(x, torch.zeros(4), torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match=r"swiglu: rows must be \[T, 4\], got \(3, 5\)"):
        swiglu(x, torch.zeros(7, 4), torch.zeros(7, 4), torch.zeros(4, 7))


@pytest.mark.parametrize("outputs", [1, 2, 5, 7, 9, 11, 12])
@pytest.mark.parametrize("width", [5, 7, 33, 257])
def test_narrow_odd_widths_give_equal_bits_to_equal_rows(outputs: int, width: int) -> None:
    """MKL computes the last rows of such a product otherwise than the first; widths are padded so that it can not."""
    row = torch.randn(1, width).expand(64, width).contiguous()
    for result in (
        linear(row, torch.randn(outputs, width)),
        swiglu(row, torch.randn(outputs, width), torch.randn(outputs, width), torch.randn(width, outputs)),
        head_linear(row.unsqueeze(1).repeat(1, 2, 1), torch.randn(2, width, outputs)).flatten(1),
        head_linear(row.unsqueeze(1).repeat(1, 2, 1), torch.randn(2, outputs, width).transpose(1, 2)).flatten(1),
    ):
        assert (result == result[0]).all()


def test_head_linear_writes_into_a_slice() -> None:
    x, weight = torch.randn(70, 3, 24), torch.randn(3, 24, 40)
    room = torch.full((70, 3, 48), 7.0)
    made = head_linear(x, weight, out=room[..., :40])
    assert made.data_ptr() == room.data_ptr()
    assert torch.equal(made, head_linear(x, weight))
    assert (room[..., 40:] == 7).all()


def test_three_bf16_parts_are_the_float32_value() -> None:
    """Also of values whose middle bits are all ones or zeros, and of powers of two over the normal range."""
    from cptools.kernels.rowwise.fp32_product import bf16_parts

    bits = torch.randint(0, 1 << 23, (1 << 16,)) | torch.randint(30, 250, (1 << 16,)) << 23
    edges = torch.tensor([0, 0x7FFFFF, 0x00FFFF, 0x7F8000, 0x008000, 0x017FFF, 1]) | 127 << 23
    values = torch.cat([bits, edges]).to(torch.int32).view(torch.float32)
    values = torch.cat([values, -values, torch.zeros(1)])
    parts = bf16_parts(values)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), values.double())


def test_products_in_float32_refuse_other_matrices() -> None:
    x = torch.randn(3, 16)
    assert torch.equal(linear_in_fp32(x, torch.eye(16)), x)
    assert linear_in_fp32(x.bfloat16(), torch.eye(16)).dtype == torch.float32
    for weight in (torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 15), torch.zeros(16)):
        with pytest.raises(ValueError, match=r"linear_in_fp32: x \(3, 16\)"):
            linear_in_fp32(x, weight)
