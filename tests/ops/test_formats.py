"""Row formats against bytes that numpy and exact fractions make from the definitions of e4m3, bf16 and the scale."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cptools.formats import (
    BF16_MLA,
    FP8,
    FP8_INDEX,
    FP8_MLA,
    IndexRows,
    MlaRows,
    dequantize_fp8,
    fp8_scale,
    quantize_fp8,
)
from cptools.paged_rows import PagedRows

INF, NAN = math.inf, math.nan

# The 127 magnitudes of e4m3fn by their byte: 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is NaN.
E4M3 = np.array([(b & 7) / 8 * 2.0**-6 if b < 8 else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 7) for b in range(127)])


def e4m3_bytes(x: np.ndarray) -> np.ndarray:
    """Nearest e4m3 byte of float64 values within +-448, ties to the even byte."""
    magnitude = np.abs(x)
    above = np.searchsorted(E4M3, magnitude).clip(max=126)
    below = (above - 1).clip(min=0)
    to_above, to_below = E4M3[above] - magnitude, magnitude - E4M3[below]
    nearest = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return (nearest | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e4m3_values(b: np.ndarray) -> np.ndarray:
    return E4M3[b & 0x7F] * np.where(b & 0x80, -1.0, 1.0)


def bf16_bytes(x: np.ndarray) -> np.ndarray:
    """Little-endian bf16 bytes of finite float32 values, rounded to nearest even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)


def exact_scale(amax: float) -> float:
    """2^ceil(log2(max(amax / 448, 1e-4))) by comparing fractions."""
    ratio = max(Fraction(amax) / 448, Fraction(1, 10_000))
    exponent = -20
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    return 2.0**exponent


def fp8_block_bytes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row's values [D] float32 -> (D bytes, bytes of its ceil(D / 128) scales)."""
    values, scales = [], []
    for block in np.split(x.astype(np.float64), range(128, len(x), 128)):
        scales.append(exact_scale(float(np.abs(block).max())))
        values.append(e4m3_bytes(block / scales[-1]))
    return np.concatenate(values), np.array(scales, dtype="<f4").view(np.uint8)


def random_values(rows: int, width: int, seed: int) -> Tensor:
    """Values whose blocks have very different magnitudes, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 10 ** torch.empty(rows, 1).uniform_(-6, 6, generator=generator)
    x[torch.rand(rows, width, generator=generator) < 0.02] = 0.0
    x[torch.rand(rows, width, generator=generator) < 0.02] = -0.0
    return x


def test_sizes_of_glm53() -> None:
    assert (BF16_MLA.row_bytes, FP8_MLA.row_bytes, FP8_INDEX.row_bytes) == (1152, 656, 132)
    assert MlaRows(512, 64, torch.float32).row_bytes == 2304
    assert IndexRows(128, torch.bfloat16).row_bytes == 256
    assert (BF16_MLA.planes, FP8_MLA.planes, FP8_INDEX.planes) == ((1152,), (656,), (128, 4))


@pytest.mark.parametrize(
    "latent, rope, row_bytes",
    [(24, 8, 24 + 4 + 16), (200, 64, 200 + 8 + 128), (128, 0, 132), (129, 2, 129 + 8 + 4), (256, 32, 256 + 8 + 64)],
)
def test_fp8_row_has_a_scale_per_128_values_or_part_of_them(latent, rope, row_bytes) -> None:
    row_format = MlaRows(latent, rope, FP8)
    assert row_format.row_bytes == row_bytes
    assert row_format.num_scales == math.ceil(latent / 128)
    assert MlaRows(latent, rope, torch.bfloat16).row_bytes == 2 * (latent + rope)


def test_fp8_mla_bytes_stand_where_the_format_says() -> None:
    """656 B: [0, 512) e4m3, [512, 528) four fp32 scales, [528, 656) 64 bf16."""
    latent, rope = random_values(9, 512, 0), torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    latent[:, 128:256] *= 1e3  # each block its own scale
    rows = FP8_MLA.pack(latent, rope).numpy()
    assert rows.shape == (9, 656)
    for row, values, rotated in zip(rows, latent.numpy(), rope.numpy(), strict=True):
        value_bytes, scale_bytes = fp8_block_bytes(values)
        assert np.array_equal(row[:512], value_bytes)
        assert np.array_equal(row[512:528], scale_bytes)
        assert np.array_equal(row[528:], bf16_bytes(rotated))


@pytest.mark.parametrize("latent, rope", [(24, 8), (200, 64), (128, 0), (132, 2), (256, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_fp8_bytes_of_other_sizes(latent, rope, tokens) -> None:
    row_format = MlaRows(latent, rope, FP8)
    x, rotated = random_values(tokens, latent, 2), torch.randn(tokens, rope)
    rows = row_format.pack(x, rotated)
    unpacked, unpacked_rope = row_format.unpack(rows)
    for t in range(tokens):
        value_bytes, scale_bytes = fp8_block_bytes(x[t].numpy())
        expected = np.concatenate([value_bytes, scale_bytes, bf16_bytes(rotated[t].numpy())])
        assert np.array_equal(rows[t].numpy(), expected)
        scales = scale_bytes.view("<f4").astype(np.float64).repeat(128)[:latent]
        assert np.array_equal(unpacked[t].numpy().astype(np.float64), e4m3_values(value_bytes) * scales)
    assert torch.equal(unpacked_rope, rotated.bfloat16().float())


def test_float_rows_are_the_values_back_to_back() -> None:
    latent, rope = random_values(4, 512, 3), random_values(4, 64, 4)
    both = torch.cat([latent, rope], 1)
    rows = MlaRows(512, 64, torch.float32).pack(latent, rope)
    assert np.array_equal(rows.numpy(), both.numpy().astype("<f4").view(np.uint8))
    rows = BF16_MLA.pack(latent, rope)
    assert np.array_equal(rows.numpy(), bf16_bytes(both.numpy()).reshape(4, 1152))
    assert torch.equal(BF16_MLA.unpack_joint(rows), both.bfloat16().float())


def test_fp8_index_page_holds_all_keys_then_all_scales() -> None:
    """A page of 64 rows is 64 x 128 key bytes, then 64 fp32 scales: 8192 + 256 B, as DeepGEMM reads it."""
    keys = random_values(130, 128, 5)
    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(6))[:130]
    paged = PagedRows(FP8_INDEX, num_layers=2, num_pages=3, page_size=64)
    assert paged.pages.shape == (2, 3, 64 * 132)
    paged.pages.fill_(0xEE)
    paged.store(1, slots, FP8_INDEX.pack(keys))
    expected = np.full((3, 64 * 132), 0xEE, dtype=np.uint8)
    for slot, key in zip(slots.tolist(), keys.numpy(), strict=True):
        page, offset = divmod(slot, 64)
        value_bytes, scale_bytes = fp8_block_bytes(key)
        expected[page, 128 * offset : 128 * offset + 128] = value_bytes
        expected[page, 8192 + 4 * offset : 8192 + 4 * offset + 4] = scale_bytes
    assert np.array_equal(paged.pages[1].numpy(), expected)
    assert (paged.pages[0] == 0xEE).all()


def test_fp8_mla_page_holds_rows_back_to_back() -> None:
    rows = torch.arange(4 * 656).view(4, 656).to(torch.uint8)
    paged = PagedRows(FP8_MLA, num_layers=1, num_pages=2, page_size=2)
    paged.store(0, torch.tensor([3, 0, 2, 1]), rows)
    assert torch.equal(paged.pages.view(4, 656), rows[[1, 3, 2, 0]])


def test_scale_at_and_next_to_powers_of_two() -> None:
    """A rounded logarithm would be off by a factor of two exactly here."""
    amax = [0.0, 1e-45, 448e-4]
    for exponent in range(-14, 120):
        exact = np.float32(448 * 2.0**exponent)
        amax += [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(INF))]
        amax += [np.float32(2.0**exponent), np.float32(255.9 * 2.0**exponent)]
    scales = fp8_scale(torch.tensor(np.array(amax, dtype=np.float32)))
    for value, scale in zip(amax, scales.tolist(), strict=True):
        assert scale == exact_scale(float(np.float32(value))), value


@given(st.floats(0, 2.0**127, width=32))
def test_scale_is_the_exact_power_of_two(amax) -> None:
    assert fp8_scale(torch.tensor(amax)).item() == exact_scale(amax)


def test_scale_that_is_no_power_of_two() -> None:
    amax = torch.tensor([0.0, 0.0447, 0.0449, 1.0, 448.0, 450.0, 1e6])
    scale = fp8_scale(amax, power_of_two=False)
    expected = np.maximum(amax.numpy() / np.float32(448), np.float32(1e-4))
    assert np.array_equal(scale.numpy(), expected)
    x = random_values(7, 300, 7)
    row_format = MlaRows(300, 4, FP8, power_of_two_scales=False)
    rows = row_format.pack(x, torch.zeros(7, 4))
    blocks = [block.abs().amax(1) for block in x.split(128, 1)]
    scales = rows[:, 300:312].contiguous().view(torch.float32)
    expected = np.maximum(torch.stack(blocks, 1).numpy() / np.float32(448), np.float32(1e-4))
    assert np.array_equal(scales.numpy(), expected)
    assert not np.isin(np.frexp(expected[expected > 1e-4])[0], 0.5).all()
    latent, _ = row_format.unpack(rows)
    assert_within_e4m3(latent, x, scales)


def assert_within_e4m3(rounded: Tensor, x: Tensor, scales: Tensor) -> None:
    """Half a step: 2^-4 of a normal value, 2^-10 of the scale below; a little more for a scale with rounding."""
    step = scales.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    bound = torch.maximum(x.double().abs() * 2.0**-4, step * 2.0**-10) * (1 + 2.0**-20)
    assert ((rounded.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("width", [1, 127, 128, 129, 512])
def test_quantisation_error_is_half_a_step(width) -> None:
    x = random_values(200, width, 8)
    values, scales = quantize_fp8(x)
    assert scales.shape == (200, math.ceil(width / 128))
    assert values.shape == x.shape
    assert_within_e4m3(dequantize_fp8(values, scales), x, scales)


def test_zero_rows_stay_zero_with_a_finite_scale() -> None:
    """A scale without a floor divides by zero."""
    rows = FP8_MLA.pack(torch.zeros(2, 512), torch.zeros(2, 64))
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert (scales == 2.0**-13).all()
    assert (FP8_MLA.unpack_joint(rows) == 0).all()
    assert (FP8_INDEX.unpack(FP8_INDEX.pack(torch.zeros(3, 128))) == 0).all()


@pytest.mark.parametrize("poison", [NAN, -NAN, INF, -INF])
def test_nan_and_inf_stay_visible_in_their_block_only(poison) -> None:
    latent, rope = random_values(3, 512, 9), torch.zeros(3, 64)
    clean = FP8_MLA.unpack_joint(FP8_MLA.pack(latent, rope))
    latent[1, 200] = poison
    read = FP8_MLA.unpack_joint(FP8_MLA.pack(latent, rope))
    assert not read[1, 200].isfinite()
    read[1, 128:256] = clean[1, 128:256]
    assert torch.equal(read, clean)
    key = random_values(2, 128, 10)
    key[0, 5] = poison
    assert not FP8_INDEX.unpack(FP8_INDEX.pack(key))[0, 5].isfinite()
    rope[2, 3] = poison
    assert not FP8_MLA.unpack(FP8_MLA.pack(latent, rope))[1][2, 3].isfinite()


def test_packing_what_was_read_changes_nothing() -> None:
    x, rope = random_values(300, 512, 11), torch.randn(300, 64)
    rows = FP8_MLA.pack(x, rope)
    read = FP8_MLA.unpack(rows)
    again = FP8_MLA.pack(*read)
    assert torch.equal(FP8_MLA.unpack_joint(again), torch.cat(read, 1))
    # A block whose largest value was rounded down to 224 scales takes half the scale: equal values, other bytes, once.
    halved = (rows[:, :512].unflatten(1, (4, 128)).bitwise_and(0x7F).amax(2) == E4M3.tolist().index(224)).any(1)
    assert 0 < halved.sum() < 300
    assert torch.equal(rows[~halved], again[~halved])
    assert torch.equal(FP8_MLA.pack(*FP8_MLA.unpack(again)), again)
    for row_format in (BF16_MLA, MlaRows(512, 64, torch.float32)):
        rows = row_format.pack(x, rope)
        assert torch.equal(row_format.pack(*row_format.unpack(rows)), rows)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, rope, keys = random_values(70, 512, 12), torch.randn(70, 64), random_values(70, 128, 13)
    rows, index = FP8_MLA.pack(x, rope), FP8_INDEX.pack(keys)
    for t in (0, 1, 33, 69):
        assert torch.equal(FP8_MLA.pack(x[t : t + 1], rope[t : t + 1])[0], rows[t])
        assert torch.equal(FP8_INDEX.pack(keys[t : t + 1])[0], index[t])
        assert torch.equal(FP8_INDEX.unpack(index[t : t + 1])[0], FP8_INDEX.unpack(index)[t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_no_row(dtype) -> None:
    mla, index = MlaRows(24, 8, dtype), IndexRows(16, dtype)
    rows = mla.pack(torch.empty(0, 24), torch.empty(0, 8))
    assert rows.shape == (0, mla.row_bytes)
    assert rows.dtype == torch.uint8
    assert [x.shape for x in mla.unpack(rows)] == [(0, 24), (0, 8)]
    assert index.unpack(index.pack(torch.empty(0, 16))).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_strided_inputs_and_rows(dtype) -> None:
    x, rope = random_values(6, 48, 14), torch.randn(6, 16)
    row_format = MlaRows(24, 8, dtype)
    rows = row_format.pack(x[:, :24].contiguous(), rope[:, 8:].contiguous())
    assert torch.equal(row_format.pack(x[:, :24], rope[:, 8:]), rows)
    wide = torch.empty(6, row_format.row_bytes + 3, dtype=torch.uint8)
    wide[:, 3:] = rows
    assert torch.equal(row_format.unpack_joint(wide[:, 3:]), row_format.unpack_joint(rows))


def test_lower_precision_inputs_are_read_as_they_are() -> None:
    x, rope = random_values(5, 512, 15).bfloat16(), torch.randn(5, 64).bfloat16()
    assert torch.equal(FP8_MLA.pack(x, rope), FP8_MLA.pack(x.float(), rope.float()))
    assert torch.equal(FP8_INDEX.pack(x[:, :128]), FP8_INDEX.pack(x[:, :128].float()))


def test_index_query_is_rounded_per_head_only_with_fp8_rows() -> None:
    query = random_values(15, 128, 16).view(5, 3, 128)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(IndexRows(128, dtype).round_query(query), query)
    rounded = FP8_INDEX.round_query(query)
    for t in range(5):
        for head in range(3):
            value_bytes, scale_bytes = fp8_block_bytes(query[t, head].numpy())
            expected = e4m3_values(value_bytes) * float(scale_bytes.view("<f4")[0])
            assert np.array_equal(rounded[t, head].numpy().astype(np.float64), expected)


def test_wrong_arguments_raise_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"\[T, 512\] and \[T, 64\], got \(2, 511\) and \(2, 64\)"):
        FP8_MLA.pack(torch.zeros(2, 511), torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"got \(2, 512\) and \(3, 64\)"):
        BF16_MLA.pack(torch.zeros(2, 512), torch.zeros(3, 64))
    with pytest.raises(ValueError, match=r"got \(512,\) and \(64,\)"):
        BF16_MLA.pack(torch.zeros(512), torch.zeros(64))
    with pytest.raises(ValueError, match=r"\[T, 128\], got \(2, 3, 128\)"):
        FP8_INDEX.pack(torch.zeros(2, 3, 128))
    with pytest.raises(ValueError, match=r"\[T, 656\], got torch\.uint8 \(2, 655\)"):
        FP8_MLA.unpack(torch.zeros(2, 655, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[T, 132\], got torch\.int8 \(2, 132\)"):
        FP8_INDEX.unpack(torch.zeros(2, 132, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"dtype=torch\.float16"):
        MlaRows(512, 64, torch.float16)
    with pytest.raises(ValueError, match="latent=0 must be >= 1"):
        MlaRows(0, 64, FP8)
    with pytest.raises(ValueError, match="rope=-1"):
        MlaRows(512, -1, FP8)
    with pytest.raises(ValueError, match="dim=0"):
        IndexRows(0, FP8)


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize(("latent", "rope"), [(25, 4), (25, 0), (33, 1), (512, 64)])
def test_odd_widths_unpack_at_any_number_of_rows(rows: int, latent: int, rope: int) -> None:
    """A single row's slice counts as contiguous wherever it starts, and can not be viewed as a wider type there."""
    for dtype in (torch.float32, torch.bfloat16, FP8):
        mla, index = MlaRows(latent, rope, dtype), IndexRows(latent, dtype)
        assert mla.unpack(mla.pack(torch.ones(rows, latent), torch.ones(rows, rope)))[0].eq(1).all()
        assert index.unpack(index.pack(torch.ones(rows, latent))).eq(1).all()


def test_rows_at_an_odd_address_unpack() -> None:
    row_format = MlaRows(8, 0, torch.float32)
    values = torch.randn(2, 8)
    shifted = torch.empty(65, dtype=torch.uint8)[1:].view(2, 32)
    shifted.copy_(row_format.pack(values, torch.empty(2, 0)))
    assert torch.equal(row_format.unpack_joint(shifted), values)
