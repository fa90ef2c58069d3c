"""Attention over selected rows against fp64, its holes and poison, and its batch invariance bit by bit."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cptools.kernels.sparse_mla import QUERY_TILE, sparse_mla
from cptools.partial import Partial, merge_partials

INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_ids(tokens: int, k: int, length: int, seed: int, *, holes: float = 0.0) -> Tensor:
    """Different ids per query, a share of them -1; needs k <= length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(length, generator=generator)[:k] for _ in range(tokens)])
    return ids.masked_fill(torch.rand(tokens, k, generator=generator) < holes, -1)


def attention(query: Tensor, rows: Tensor, ids: Tensor, scale: float, v_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """fp64, one query and head at a time, over the ids inside [0, S), each as often as it stands there."""
    q, r = query.double().numpy(), rows.double().numpy()
    out, lse = np.zeros((*q.shape[:2], v_dim)), np.full(q.shape[:2], -INF)
    for t, row_ids in enumerate(ids.tolist()):
        used = r[[i for i in row_ids if 0 <= i < len(r)]]
        for h in range(q.shape[1]):
            if len(used):
                scores = used @ q[t, h] * scale
                lse[t, h] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
                out[t, h] = np.exp(scores - lse[t, h]) @ used[:, :v_dim]
    return out, lse


def assert_attends(
    query: Tensor,
    rows: Tensor,
    ids: Tensor,
    *,
    scale: float,
    v_dim: int,
    atol: float = 2e-5,
    clean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`clean`: the rows for the oracle, where `rows` is poisoned in places that must not matter."""
    out, lse = sparse_mla(query, rows, ids, scale=scale, v_dim=v_dim)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == (*query.shape[:2], v_dim)
    expected_out, expected_lse = attention(query, rows if clean is None else clean, ids, scale, v_dim)
    np.testing.assert_allclose(out.double().numpy(), expected_out, rtol=0, atol=atol)
    np.testing.assert_allclose(lse.double().numpy(), expected_lse, rtol=1e-6, atol=atol)
    return out, lse


@pytest.mark.parametrize(
    "heads, dim, v_dim, k",
    [(1, 1, 1, 1), (2, 5, 3, 7), (3, 33, 32, 40), (4, 40, 32, 64), (64, 24, 16, 33), (8, 576, 512, 100)],
)
@pytest.mark.parametrize("tokens", [1, QUERY_TILE, QUERY_TILE + 1])
def test_in_fp64(heads, dim, v_dim, k, tokens) -> None:
    query, rows = normal(tokens, heads, dim, seed=0), normal(120, dim, seed=1)
    assert_attends(query, rows, random_ids(tokens, k, 120, 2, holes=0.2), scale=dim**-0.5, v_dim=v_dim)


def test_values_are_the_first_columns_of_a_row() -> None:
    query, rows = torch.zeros(1, 2, 5), torch.arange(20.0).view(4, 5)
    out, lse = sparse_mla(query, rows, torch.tensor([[3, 1]]), scale=1.0, v_dim=2)
    assert out.tolist() == [[[10.0, 11.0], [10.0, 11.0]]]  # the mean of rows 1 and 3
    assert lse[0].tolist() == pytest.approx([math.log(2)] * 2)


def test_scale_multiplies_the_scores() -> None:
    query, rows = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[3.0, 1.0], [0.0, 5.0]])
    out, lse = sparse_mla(query, rows, torch.tensor([[0, 1]]), scale=0.25, v_dim=2)
    weight = math.exp(1.5) / (math.exp(1.5) + 1)
    assert out[0, 0].tolist() == pytest.approx([3 * weight, weight + 5 * (1 - weight)])
    assert lse.item() == pytest.approx(math.log(math.exp(1.5) + 1))


def test_no_lane_but_the_valid_ones_is_read() -> None:
    """-1 anywhere, ids >= S and far beyond, a row of none: as if they were not there."""
    query, rows = normal(6, 3, 24, seed=3), normal(50, 24, seed=4)
    ids = random_ids(6, 20, 50, 5)
    ids[0, ::2] = -1
    ids[1, :19] = -1
    ids[2, 1:] = -1
    ids[3, 5:9] = torch.tensor([50, 51, 2_147_480_000, 2**31 - 1])
    ids[3, 9:12] = torch.tensor([-2, -(2**31), 2**40])
    ids[4] = -1
    ids[5] = 50
    out, lse = assert_attends(query, rows, ids, scale=0.2, v_dim=16)
    assert not out[4:].any()
    assert (lse[4:] == -INF).all()
    assert lse[:4].isfinite().all()


def test_row_0_is_not_read_for_a_hole() -> None:
    """Holes are looked up at some row: what it holds must not matter, NaN included."""
    query, clean = normal(4, 3, 24, seed=6), normal(50, 24, seed=7)
    ids = random_ids(4, 20, 49, 8) + 1
    ids[:, ::3] = -1
    ids[3] = -1
    for poison in (NAN, INF):
        rows = clean.clone()
        rows[0] = poison
        out, lse = assert_attends(query, rows, ids, scale=0.2, v_dim=16, clean=clean)
        assert not out[3].any()
        assert (lse[3] == -INF).all()


def test_rows_that_no_query_selects_never_matter() -> None:
    query, clean = normal(20, 3, 24, seed=9), normal(50, 24, seed=10)
    ids = random_ids(20, 10, 30, 11, holes=0.2)
    rows = clean.clone()
    rows[30:] = NAN
    assert_attends(query, rows, ids, scale=0.2, v_dim=16, clean=clean)
    # A row that one query of the tile selects is unselected for the others.
    rows = clean.clone()
    rows[7] = NAN
    out, lse = sparse_mla(query, rows, ids, scale=0.2, v_dim=16)
    expected, _ = attention(query, clean, ids, 0.2, 16)
    hit = (ids == 7).any(1)
    assert 0 < hit.sum() < 20
    np.testing.assert_allclose(out[~hit].double().numpy(), expected[~hit], rtol=0, atol=2e-5)
    assert out[hit].isnan().all()  # a NaN that is selected stays visible
    assert lse[hit].isnan().all()


def test_an_id_named_twice_counts_twice() -> None:
    query, rows = normal(5, 2, 24, seed=12), normal(9, 24, seed=13)
    ids = torch.randint(-1, 9, (5, 30), generator=torch.Generator().manual_seed(14))
    assert_attends(query, rows, ids, scale=0.2, v_dim=24)


def test_order_of_the_ids_matters_only_to_rounding() -> None:
    query, rows, ids = normal(5, 2, 24, seed=15), normal(90, 24, seed=16), random_ids(5, 60, 90, 17, holes=0.3)
    out, lse = assert_attends(query, rows, ids, scale=0.2, v_dim=16)
    shuffled = ids[:, torch.randperm(60, generator=torch.Generator().manual_seed(18))]
    out2, lse2 = sparse_mla(query, rows, shuffled, scale=0.2, v_dim=16)
    torch.testing.assert_close(out2, out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse2, lse, rtol=0, atol=1e-5)


def test_lanes_beyond_the_valid_ones() -> None:
    """65 queries, 100 valid lanes of 256, the others -1: as the 100 lanes alone (field case D4)."""
    query, rows = normal(65, 2, 24, seed=19), normal(300, 24, seed=20)
    ids = random_ids(65, 256, 300, 21)
    ids[:, 100:] = -1
    assert_attends(query, rows, ids, scale=0.2, v_dim=16)
    out, lse = sparse_mla(query, rows, ids, scale=0.2, v_dim=16)
    expected_out, expected_lse = attention(query, rows, ids[:, :100], 0.2, 16)
    np.testing.assert_allclose(out.double().numpy(), expected_out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse.double().numpy(), expected_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_score_gaps_of_1e4(gap) -> None:
    """exp of such a gap overflows or vanishes: the better row wins outright, ties share."""
    rows = torch.tensor([[0.0, 1.0, 7.0], [gap, 2.0, 3.0], [gap, 4.0, 5.0], [gap / 2, 6.0, 1.0]])
    query = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]])  # one-hot, so that scores are exact
    _, lse = assert_attends(query, rows, torch.tensor([[0, 1, -1, 2, 3]]), scale=1.0, v_dim=3, atol=1e-3)
    assert lse.isfinite().all()


def test_bf16_rows_are_read_as_they_are() -> None:
    query, rows, ids = (
        normal(3, 2, 24, seed=22).bfloat16(),
        normal(50, 24, seed=23).bfloat16(),
        random_ids(3, 20, 50, 24),
    )
    out, _ = assert_attends(query, rows, ids, scale=0.2, v_dim=16)
    assert torch.equal(out, sparse_mla(query.float(), rows.float(), ids.int(), scale=0.2, v_dim=16)[0])


def test_no_query_no_row() -> None:
    out, lse = sparse_mla(
        torch.empty(0, 2, 8), torch.empty(5, 8), torch.empty(0, 3, dtype=torch.int64), scale=1.0, v_dim=4
    )
    assert out.shape == (0, 2, 4)
    assert lse.shape == (0, 2)
    out, lse = sparse_mla(
        normal(3, 2, 8, seed=25), torch.empty(0, 8), torch.zeros(3, 4, dtype=torch.int64), scale=1.0, v_dim=4
    )
    assert not out.any()
    assert (lse == -INF).all()


def test_wrong_shapes_raise_with_the_numbers() -> None:
    """Among them an id table that is too narrow or too short for the queries (field case D7)."""
    query, rows, ids = torch.zeros(3, 2, 8), torch.zeros(9, 8), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(3, 2, 8\), \(9, 7\), v_dim=4"):
        sparse_mla(query, rows[:, :7], ids, scale=1.0, v_dim=4)
    with pytest.raises(ValueError, match="v_dim=9"):
        sparse_mla(query, rows, ids, scale=1.0, v_dim=9)
    with pytest.raises(ValueError, match="v_dim=0"):
        sparse_mla(query, rows, ids, scale=1.0, v_dim=0)
    with pytest.raises(ValueError, match=r"\(3, 8\), \(9, 8\)"):
        sparse_mla(query[:, 0], rows, ids, scale=1.0, v_dim=4)
    with pytest.raises(ValueError, match=r"ids must be int64 or int32 \[3, any\], got int64 \[2, 4\]"):
        sparse_mla(query, rows, ids[:2], scale=1.0, v_dim=4)
    with pytest.raises(ValueError, match=r"ids must be int64 or int32 \[3, any\], got int64 \[3\]"):
        sparse_mla(query, rows, ids[:, 0], scale=1.0, v_dim=4)


def test_arguments_are_not_written() -> None:
    query, rows, ids = normal(20, 2, 8, seed=26), normal(9, 8, seed=27), random_ids(20, 6, 9, 28, holes=0.3)
    before = [x.clone() for x in (query, rows, ids)]
    sparse_mla(query, rows, ids, scale=1.0, v_dim=4)
    assert all(torch.equal(x, y) for x, y in zip(before, (query, rows, ids), strict=True))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 16])
def test_parts_with_holes_merge_to_the_whole(parts, interleave) -> None:
    """Each rank attends to its own rows, -1 where another owns one; queries with no row on a rank among them.

    Interleave 1 and more give the same attention (field case C4); ranks without any row are empty (B1).
    """
    query, rows = normal(30, 3, 40, seed=29), normal(100, 40, seed=30)
    ids = random_ids(30, 24, 100, 31, holes=0.2)
    ids[5] = -1
    ids[6, 1:] = -1  # one row in all, so that all ranks but one are empty
    position = torch.arange(100)
    owner = position // interleave % parts
    local = position // (parts * interleave) * interleave + position % interleave
    partials = []
    for rank in range(parts):
        mine = (ids >= 0) & (owner[ids.clamp(min=0)] == rank)
        local_ids = torch.where(mine, local[ids.clamp(min=0)], -1)
        partials.append(Partial(*sparse_mla(query, rows[owner == rank], local_ids, scale=0.16, v_dim=32)))
    merged = merge_partials(partials)
    expected_out, expected_lse = attention(query, rows, ids, 0.16, 32)
    np.testing.assert_allclose(merged.out.double().numpy(), expected_out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(merged.lse.double().numpy(), expected_lse, rtol=1e-6, atol=2e-5)
    out, lse = sparse_mla(query, rows, ids, scale=0.16, v_dim=32)
    torch.testing.assert_close(merged.out, out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(merged.lse, lse, rtol=2e-6, atol=2e-6)
    assert not merged.out[5].any()
    assert (merged.lse[5] == -INF).all()


def test_keys_are_there_but_none_is_selected() -> None:
    """A rank with rows, all of them hidden from the query, is empty: out 0, lse -inf (field case B2)."""
    query, rows = normal(2, 3, 24, seed=32), normal(50, 24, seed=33)
    ids = torch.full((2, 8), -1)
    ids[1, 3] = 20
    empty = Partial(*sparse_mla(query, rows, ids, scale=0.2, v_dim=16))
    assert not empty.out[0].any()
    assert (empty.lse[0] == -INF).all()
    other = Partial(*sparse_mla(query[:1], rows, torch.arange(8).view(1, 8), scale=0.2, v_dim=16))
    merged = merge_partials([Partial(empty.out[:1], empty.lse[:1]), other])
    assert torch.equal(merged.out, other.out)
    assert torch.equal(merged.lse, other.lse)


@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_parts_with_a_score_gap_merge_exactly(gap) -> None:
    """The part with the better scores decides; the other one's share underflows to nothing."""
    rows = torch.tensor([[gap, 1.0], [gap, 3.0], [-gap, 100.0], [0.0, 50.0]])
    query = torch.tensor([[[1.0, 0.0]]])
    high, low = (
        Partial(*sparse_mla(query, rows, torch.tensor([ids]), scale=1.0, v_dim=2)) for ids in ([0, 1, -1], [2, 3, -1])
    )
    for merged in (merge_partials([high, low]), merge_partials([low, high])):
        assert merged.out[0, 0].tolist() == pytest.approx([gap, 2.0], rel=1e-6)
        assert merged.lse.item() == pytest.approx(gap + math.log(2), rel=1e-6)


def test_rows_beyond_2_31_elements(virtual_bytes: Callable[[int], Tensor]) -> None:
    """2,097,153 rows of stride 1,024: the last row's offset does not fit 31 bits (field case D12)."""
    count = 2_097_153
    rows = virtual_bytes(count * 1024 * 4).view(torch.float32).view(count, 1024)[:, :8]
    rows[-3:] = normal(3, 8, seed=34)
    query, ids = normal(2, 2, 8, seed=35), torch.tensor([[count - 1, -1, count - 3], [count, count - 2, 0]])
    used = torch.cat([rows[-3:], rows[:1]])
    local = torch.tensor([[2, -1, 0], [-1, 1, 3]])
    expected_out, expected_lse = attention(query, used, local, 0.3, 4)
    out, lse = sparse_mla(query, rows, ids, scale=0.3, v_dim=4)
    np.testing.assert_allclose(out.double().numpy(), expected_out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse.double().numpy(), expected_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "heads, dim, v_dim, k", [(1, 32, 24, 17), (2, 40, 32, 64), (3, 100, 64, 33), (8, 72, 64, 128), (64, 576, 512, 40)]
)
def test_batch_invariance(heads, dim, v_dim, k, set_threads: Callable[[int], None]) -> None:
    """A query's bits are those it has alone, in any tile, beside any others, from any memory."""
    tokens, length = 50, 150
    query, rows = normal(tokens, heads, dim, seed=36), normal(length, dim, seed=37)
    ids = random_ids(tokens, k, length, 38, holes=0.1)
    ids[3] = -1

    def run(part: slice, query: Tensor = query, rows: Tensor = rows) -> tuple[Tensor, Tensor]:
        return sparse_mla(query[part], rows, ids[part], scale=0.1, v_dim=v_dim)

    set_threads(1)
    alone = [run(slice(t, t + 1)) for t in range(tokens)]
    out, lse = (torch.cat(column) for column in zip(*alone, strict=True))
    odd_query = torch.empty(query.numel() + 1)[1:].view(query.shape).copy_(query)
    odd_rows = torch.empty(rows.numel() + 1)[1:].view(rows.shape).copy_(rows)
    wide = torch.full((length, 2 * dim), NAN)
    wide[:, ::2] = rows
    for threads in (1, 2):
        set_threads(threads)
        for part in (slice(0, 2), slice(1, 16), slice(0, 16), slice(5, 22), slice(40, 50), slice(None)):
            batch = run(part)
            assert torch.equal(batch[0], out[part])
            assert torch.equal(batch[1], lse[part])
        for moved in ({"query": odd_query}, {"rows": odd_rows}, {"rows": wide[:, ::2]}):
            batch = run(slice(None), **moved)
            assert torch.equal(batch[0], out)
            assert torch.equal(batch[1], lse)


def test_nan_in_one_query_stays_there() -> None:
    query, rows, ids = normal(17, 2, 24, seed=39), normal(50, 24, seed=40), random_ids(17, 20, 50, 41)
    clean = sparse_mla(query, rows, ids, scale=0.2, v_dim=16)
    query[4, 1, 0] = NAN
    out, lse = sparse_mla(query, rows, ids, scale=0.2, v_dim=16)
    assert out[4, 1].isnan().all()
    assert lse[4, 1].isnan()
    out[4, 1], lse[4, 1] = clean[0][4, 1], clean[1][4, 1]
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


@pytest.mark.parametrize(
    ("heads", "depth", "v_dim", "k"), [(1, 40, 33, 16), (2, 33, 32, 64), (3, 5, 3, 100), (5, 33, 32, 5)]
)
def test_odd_widths_give_equal_bits_to_equal_queries(heads: int, depth: int, v_dim: int, k: int) -> None:
    query = torch.randn(1, heads, depth).expand(16, heads, depth).contiguous()
    out, lse = sparse_mla(query, torch.randn(200, depth), torch.arange(k).expand(16, k), scale=0.3, v_dim=v_dim)
    assert (out == out[0]).all()
    assert (lse == lse[0]).all()


def test_selection_without_columns_is_empty() -> None:
    out, lse = sparse_mla(
        torch.randn(2, 1, 4), torch.randn(3, 4), torch.empty(2, 0, dtype=torch.int64), scale=1.0, v_dim=2
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
