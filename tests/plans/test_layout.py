"""KVLayout against counting tokens one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cptools.layout import KVLayout

SMALL = [
    KVLayout(world_size, interleave, page_size)
    for world_size in range(1, 9)
    for interleave in (1, 2, 3, 4, 8)
    for page_size in (1, 3, 4, 8, 24)
    if page_size % interleave == 0
]


def deal(layout: KVLayout, tokens: int) -> list[list[int]]:
    """Positions of each rank, dealt block by block."""
    ranks: list[list[int]] = [[] for _ in range(layout.world_size)]
    for position in range(tokens):
        ranks[position // layout.interleave % layout.world_size].append(position)
    return ranks


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_closed_forms_equal_dealing_tokens_one_by_one(layout):
    tokens = 4 * layout.virtual_block + 3
    for rank, positions in enumerate(deal(layout, tokens)):
        for local_index, position in enumerate(positions):
            assert layout.owner(position) == rank
            assert layout.local_index(position) == local_index
            assert layout.position(rank, local_index) == position
            page = position // layout.virtual_block
            assert page == local_index // layout.page_size, "a page must hold the rows of its virtual block"
        for seq_len in range(tokens + 1):
            assert layout.local_len(seq_len, rank) == sum(p < seq_len for p in positions)
            assert layout.local_len(seq_len, rank) <= layout.pages(seq_len) * layout.page_size


@pytest.mark.parametrize("layout", SMALL[::5], ids=str)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_arrays_and_tensors_give_the_same_as_ints_in_their_kind(layout, dtype):
    numbers = list(range(3 * layout.virtual_block))
    array = np.array(numbers, dtype=dtype).reshape(3, -1)
    for values in (array, torch.from_numpy(array)):
        for method in (layout.owner, layout.local_index, layout.pages):
            result = method(values)
            assert type(result) is type(values)
            assert str(result.dtype).endswith("int64")
            assert result.flatten().tolist() == [method(n) for n in numbers]
        for method in (lambda r, n: layout.position(r, n), lambda r, n: layout.local_len(n, r)):
            ranks = values.reshape(-1)[: layout.world_size]
            expected = [[method(r, n) for n in numbers] for r in range(layout.world_size)]
            for result in (method(ranks[:, None], values.reshape(-1)), method(ranks, values.reshape(-1)[:, None]).T):
                assert type(result) is type(values)
                assert str(result.dtype).endswith("int64")
                assert result.tolist() == expected
            assert method(layout.world_size - 1, values.reshape(-1)).tolist() == expected[-1]
            assert method(ranks, numbers[-1]).tolist() == [row[-1] for row in expected]


layouts = st.builds(
    lambda n, i, b: KVLayout(n, i, i * b), st.integers(1, 300), st.integers(1, 200), st.integers(1, 200)
)


@given(layouts, st.integers(0, 2**40))
def test_any_position_comes_back_and_is_counted(layout, position):
    rank, local_index = layout.owner(position), layout.local_index(position)
    assert 0 <= rank < layout.world_size
    assert layout.position(rank, local_index) == position
    assert layout.local_len(position, rank) == local_index
    assert layout.local_len(position + 1, rank) == local_index + 1
    ranks = np.arange(layout.world_size)
    assert layout.local_len(position, ranks).sum() == position


@pytest.mark.parametrize("seq_len", [0, 1, 3, 4, 5, 8, 9, 16, 17])
def test_interleave_above_one_keeps_every_token(seq_len):
    """Field case C3."""
    layout = KVLayout(2, 4, 8)
    assert sum(layout.local_len(seq_len, rank) for rank in range(2)) == seq_len
    assert [layout.position(layout.owner(t), layout.local_index(t)) for t in range(seq_len)] == list(range(seq_len))


@pytest.mark.parametrize("max_len", [1, 511, 512, 513, 16384, 16385])
def test_block_table_width_counts_virtual_blocks_not_pages(max_len):
    """Field case C7."""
    layout = KVLayout(2, 1, 256)
    width = layout.pages(max_len)
    assert (width - 1) * 512 < max_len <= width * 512
    assert layout.pages(0) == 0


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((0,), "world_size=0"),
        ((2, 0), "interleave=0"),
        ((2, 1, 0), "page_size=0"),
        ((2, 3, 64), "interleave=3 must divide page_size=64"),
        ((2, 128, 64), "interleave=128 must divide page_size=64"),
        ((2.0,), r"world_size=2\.0"),
    ],
)
def test_sizes_that_are_no_layout_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        KVLayout(*sizes)


def test_ints_out_of_range_are_refused():
    layout = KVLayout(2)
    for call in (layout.owner, layout.local_index, layout.pages):
        with pytest.raises(ValueError, match="=-1 is negative"):
            call(-1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank} is outside world_size=2"):
            layout.position(rank, 0)
        with pytest.raises(ValueError, match=f"rank={rank} is outside world_size=2"):
            layout.local_len(5, rank)
    with pytest.raises(ValueError, match="local_index=-1"):
        layout.position(0, -1)
    with pytest.raises(ValueError, match="seq_len=-1"):
        layout.local_len(-1, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int8, np.int16])
def test_unsigned_and_narrow_integers_are_widened(dtype) -> None:
    """Differences of unsigned numbers wrap, and narrow ones overflow."""
    layout = KVLayout(300, 1, 1)
    lens = np.array([0, 1, 3, 5, 120], dtype)
    want = [layout.local_len(int(n), 3) for n in lens]
    assert layout.local_len(lens, 3).tolist() == want
    assert layout.position(3, lens).tolist() == [layout.position(3, int(n)) for n in lens]
    if dtype is not np.uint64:
        assert layout.local_len(torch.from_numpy(lens), 3).tolist() == want


@pytest.mark.parametrize("wrong", [1.5, True, np.array([1.0]), torch.tensor([True]), torch.tensor([0.5]), "3"])
def test_what_is_no_integer_is_refused(wrong) -> None:
    layout = KVLayout(2)
    for call in (layout.owner, layout.local_index, layout.pages, lambda x: layout.local_len(x, 0)):
        with pytest.raises(ValueError, match="must be integers"):
            call(wrong)
