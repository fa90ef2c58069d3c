"""topk_select and its int64 keys against Python's sort by (NaN first, score descending, position ascending)."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cptools.kernels.topk_select import (
    INVALID,
    choose_merge_orders,
    choose_topk_select,
    decode_order,
    encode_order,
    merge_orders,
    topk_select,
)

INF, NAN = math.inf, math.nan
SUBNORMAL = 1e-45  # the smallest fp32


def best(scores: list[float], k: int, length: int | None = None) -> list[int]:
    """Positions of the k best of the first `length` scores, padded with -1. Python's == makes -0.0 equal 0.0."""
    considered = range(len(scores) if length is None else max(0, min(length, len(scores))))
    order = sorted(
        considered, key=lambda s: (not math.isnan(scores[s]), -scores[s] if scores[s] == scores[s] else 0, s)
    )
    return (order + [-1] * k)[:k]


def assert_selects(scores: Tensor, k: int, lengths: Tensor | None = None) -> None:
    positions, chosen = topk_select(scores, k, lengths=lengths)
    assert positions.dtype == torch.int64
    assert chosen.dtype == torch.float32
    assert positions.shape == chosen.shape == (scores.shape[0], k)
    rows = scores.tolist()
    limits = [None] * len(rows) if lengths is None else lengths.tolist()
    expected = [best(row, k, limit) for row, limit in zip(rows, limits, strict=True)]
    assert positions.tolist() == expected
    for row, places, values in zip(rows, expected, chosen.tolist(), strict=True):
        for place, value in zip(places, values, strict=True):
            wanted = row[place] if place >= 0 else -INF
            assert value == wanted or (math.isnan(value) and math.isnan(wanted))


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@pytest.mark.parametrize("k", [1, 2, 7, 30, 31])
def test_random_scores(k) -> None:
    assert_selects(torch.randn(20, 30, generator=torch.Generator().manual_seed(k)), k)


@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_ties_go_to_the_lower_position(k) -> None:
    assert_selects(torch.randint(-2, 3, (50, 20), generator=torch.Generator().manual_seed(k)).float(), k)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -INF, INF, NAN])
def test_all_equal_selects_the_first(value) -> None:
    positions, _ = topk_select(torch.full((2, 4096), value), 2048)
    assert torch.equal(positions, torch.arange(2048).expand(2, -1))


def test_zeros_of_both_signs_are_equal() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0], [0.0, -0.0, SUBNORMAL, -SUBNORMAL, -0.0]])
    positions, chosen = topk_select(scores, 4)
    assert positions.tolist() == [[0, 1, 2, 3], [2, 0, 1, 4]]
    assert not torch.signbit(chosen).any()


def test_special_values_in_one_row() -> None:
    row = [-INF, 1e30, -1e30, SUBNORMAL, -SUBNORMAL, 0.0, INF, 1.17549435e-38, -1.17549435e-38, -0.0, 3e38, -3e38, NAN]
    generator = torch.Generator().manual_seed(0)
    scores = torch.stack([torch.tensor(row)[torch.randperm(len(row), generator=generator)] for _ in range(20)])
    for k in (1, 5, len(row), len(row) + 2):
        assert_selects(scores, k)


def test_nan_of_either_sign_stays_on_top() -> None:
    """Sorted by raw bits, a NaN with its sign bit set would be the worst score and vanish."""
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]
    scores = torch.zeros(1, 9)
    scores[0, 0] = INF
    scores.view(torch.int32)[0, 2:6] = torch.tensor(np.array(patterns, dtype=np.uint32).view(np.int32))
    assert scores.isnan().sum() == 4
    positions, chosen = topk_select(scores, 6)
    assert positions.tolist() == [[2, 3, 4, 5, 0, 1]]
    assert chosen[0, :4].isnan().all()


def test_a_score_of_minus_inf_is_still_a_candidate() -> None:
    positions, chosen = topk_select(torch.full((1, 3), -INF), 5)
    assert positions.tolist() == [[0, 1, 2, -1, -1]]
    assert (chosen == -INF).all()


def test_lengths_per_row() -> None:
    """0, fewer than k, k, all, and clamped from below and above."""
    scores = torch.randint(-2, 3, (9, 12), generator=torch.Generator().manual_seed(1)).float()
    assert_selects(scores, 5, torch.tensor([0, 1, 4, 5, 6, 12, 13, 2**40, -3]))


def test_what_stands_beyond_the_length_never_matters() -> None:
    scores = torch.tensor([[1.0, 3.0, INF, NAN], [NAN, 2.0, 9.0, INF]])
    positions, chosen = topk_select(scores, 3, lengths=torch.tensor([2, 0]))
    assert positions.tolist() == [[1, 0, -1], [-1, -1, -1]]
    assert chosen.tolist() == [[3.0, 1.0, -INF], [-INF] * 3]


def test_no_row_and_no_column() -> None:
    positions, chosen = topk_select(torch.empty(0, 7), 3)
    assert positions.shape == chosen.shape == (0, 3)
    positions, chosen = topk_select(torch.empty(2, 0), 3)
    assert (positions == -1).all()
    assert (chosen == -INF).all()


@pytest.mark.parametrize("count", [16_448, 32_768])
def test_crowded_scores_lose_no_candidate(count) -> None:
    """All values within 1e-3, so that a coarse histogram has one bin (field case D1)."""
    scores = 1.0 + 1e-3 * torch.rand(2, count, generator=torch.Generator().manual_seed(count))
    positions, chosen = topk_select(scores, 2048)
    for row, places, values in zip(scores.numpy(), positions.numpy(), chosen.numpy(), strict=True):
        assert np.array_equal(values, np.sort(row)[::-1][:2048])
        assert np.array_equal(row[places], values)
        assert np.array_equal(places, np.lexsort((np.arange(count), -row.astype(np.float64)))[:2048])


@pytest.mark.parametrize("count", [16_384, 16_448])
@pytest.mark.parametrize("falling", [False, True])
def test_monotone_rows_lose_no_candidate(count, falling) -> None:
    """A threshold bucket of a fixed size holds 16,384 monotone scores but not 16,448 (field case D2)."""
    scores = torch.arange(count).float().unsqueeze(0) / count
    positions, _ = topk_select(scores.flip(1) if falling else scores, 2048)
    expected = torch.arange(2048) if falling else torch.arange(count - 1, count - 2049, -1)
    assert torch.equal(positions[0], expected)


raw_bits = st.integers(0, 2**32 - 1)
places = st.integers(0, 2**32 - 1)


@given(raw_bits, places)
@example(0x80000000, 0)
@example(0xFFFFFFFF, 0)
@example(0xFF800000, 2**32 - 1)
@example(0x00000001, 2**31)
def test_decode_gives_back_what_was_encoded(bits, position) -> None:
    """On every bit pattern: the score (-0.0 as 0.0, any NaN as NaN) and the position, and never INVALID."""
    scores = torch.tensor(np.array([bits], dtype=np.uint32).view(np.float32))
    keys = encode_order(scores, torch.tensor([position]))
    assert keys.dtype == torch.int64
    assert keys.item() != INVALID
    score, place = decode_order(keys)
    assert place.item() == position
    expected = float_of(bits)
    assert math.isnan(score.item()) if math.isnan(expected) else score.item() == expected
    if expected == 0:
        assert math.copysign(1, score.item()) == 1


@given(st.tuples(raw_bits, places), st.tuples(raw_bits, places))
@example((0x7F800000, 0), (0xFFC00000, 5))
@example((0x80000000, 1), (0x00000000, 2))
@example((0x80000001, 1), (0x00000001, 2))
def test_keys_compare_as_score_then_position(a, b) -> None:
    def rank(bits: int, position: int) -> tuple[bool, float, int]:
        score = float_of(bits)
        return (math.isnan(score), 0.0 if math.isnan(score) else score, -position)

    keys = [
        encode_order(torch.tensor(np.array([bits], dtype=np.uint32).view(np.float32)), torch.tensor([position])).item()
        for bits, position in (a, b)
    ]
    assert (keys[0] < keys[1]) == (rank(*a) < rank(*b))
    assert (keys[0] == keys[1]) == (rank(*a) == rank(*b))
    assert min(keys) > INVALID


def test_invalid_decodes_to_nothing() -> None:
    scores, positions = decode_order(torch.tensor([INVALID]))
    assert scores.tolist() == [-INF]
    assert positions.tolist() == [-1]


def merged(scores: Tensor, parts: list[Tensor], k: int) -> list[list[int]]:
    """The top k of the union of parts (indices of columns), each of which sends only its own best k."""
    sent = [merge_orders(encode_order(scores[:, part], part), k) for part in parts]
    assert all(keys.shape[1] == k for keys in sent)
    return decode_order(merge_orders(torch.cat(sent, 1), k))[1].tolist()


@given(st.integers(0, 10_000))
def test_merging_splits_is_not_splitting(seed) -> None:
    """Any split, uneven and empty parts among them, whatever the ties."""
    generator = torch.Generator().manual_seed(seed)
    columns, parts, k = (
        int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 60), (1, 7), (1, 20))
    )
    scores = torch.randint(-3, 4, (3, columns), generator=generator).float()
    scores[torch.rand(3, columns, generator=generator) < 0.1] = NAN
    owner = torch.randint(0, parts, (columns,), generator=generator)
    split = [torch.nonzero(owner == part).squeeze(1) for part in range(parts)]
    assert merged(scores, split, k) == [best(row, k) for row in scores.tolist()]


@pytest.mark.parametrize("case", ["all on one part", "two on each part", "ties across parts", "all equal"])
def test_global_top_k_is_not_a_union_of_local_ones(case) -> None:
    """N = 4, K = 8, round robin (field case D21)."""
    scores = torch.rand(1, 64, generator=torch.Generator().manual_seed(2))
    if case == "all on one part":
        scores[0, 2::4][:8] += 10
    elif case == "two on each part":
        scores[0, 40:48] += 10
    elif case == "ties across parts":
        scores[0, 3:17] = 10.0
    else:
        scores[:] = 1.0
    split = [torch.arange(rank, 64, 4) for rank in range(4)]
    expected = best(scores[0].tolist(), 8)
    assert merged(scores, split, 8) == merged(scores, split[::-1], 8) == [expected]
    if case == "all on one part":
        assert {place % 4 for place in expected} == {2}
    if case == "ties across parts":
        assert expected == list(range(3, 11))


def test_merge_pads_with_invalid() -> None:
    keys = torch.tensor([[5, 9], [INVALID, 3]])
    assert merge_orders(keys, 3).tolist() == [[9, 5, INVALID], [3, INVALID, INVALID]]
    assert merge_orders(torch.empty(2, 0, dtype=torch.int64), 2).tolist() == [[INVALID] * 2] * 2


def test_a_row_does_not_depend_on_the_others() -> None:
    scores = torch.randint(-9, 9, (70, 300), generator=torch.Generator().manual_seed(3)).float()
    positions, _ = topk_select(scores, 40)
    for t in (0, 1, 63, 69):
        assert torch.equal(topk_select(scores[t : t + 1], 40)[0][0], positions[t])


def test_wrong_arguments_raise_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"scores must be float32 \[any, any\], got float32 \[7\]"):
        topk_select(torch.zeros(7), 2)
    with pytest.raises(ValueError, match="k=0 must be >= 1"):
        topk_select(torch.zeros(1, 7), 0)
    with pytest.raises(ValueError, match="float32"):
        topk_select(torch.zeros(1, 7, dtype=torch.float64), 2)


@pytest.mark.parametrize("lengths", [torch.tensor([1]), torch.tensor([1, 2]), torch.ones(3, 1, dtype=torch.int64)])
def test_lengths_of_another_shape_are_refused(lengths: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"lengths must be int64 or int32 \[3\], got"):
        topk_select(torch.zeros(3, 5), 2, lengths=lengths)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_order_and_type_of_the_output(dtype) -> None:
    scores = torch.tensor([[1.0, 5.0, NAN, 5.0, 2.0, 9.0]])
    lengths = torch.tensor([5])
    by_score = topk_select(scores, 6, lengths=lengths, positions_dtype=dtype)
    assert by_score[0].dtype == dtype
    assert by_score[0].tolist() == [[2, 1, 3, 4, 0, -1]]
    by_position = topk_select(scores, 6, lengths=lengths, sorted_by="position", positions_dtype=dtype)
    assert by_position[0].dtype == dtype
    assert by_position[0].tolist() == [[0, 1, 2, 3, 4, -1]]
    assert by_position[1][0, [0, 1, 3, 4, 5]].tolist() == [1.0, 5.0, 5.0, 2.0, -INF]
    anyhow = topk_select(scores, 6, lengths=lengths, sorted_by="none", positions_dtype=dtype)
    assert sorted(anyhow[0][0, :5].tolist()) == [0, 1, 2, 3, 4]
    assert anyhow[0][0, 5] == -1


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="sorted_by"):
        topk_select(torch.zeros(1, 7), 2, sorted_by="rank")
    with pytest.raises(ValueError, match="positions_dtype"):
        topk_select(torch.zeros(1, 7), 2, positions_dtype=torch.int16)
    with pytest.raises(ValueError, match="tensors are on cpu"):
        topk_select(torch.zeros(1, 7), 2, impl="triton")
    with pytest.raises(ValueError, match="not one of"):
        merge_orders(torch.zeros(1, 7, dtype=torch.int64), 2, impl="gluon")


def test_choice_on_the_cpu_says_why() -> None:
    choice = choose_topk_select(torch.zeros(1, 7), 2)
    assert (choice.impl, choice.fallback_reason) == ("reference", "triton: tensors are on cpu")
    assert choose_merge_orders(torch.zeros(1, 7, dtype=torch.int64), 2).impl == "reference"
