"""HostKVPool against a dict of rows."""

import gc
import mmap
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools.host_pool import HostKVPool, PoolExhausted

PIECE = 64 << 20


def make(num_pages=4, page_size=2, row_bytes=8, num_layers=3, **more) -> HostKVPool:
    return HostKVPool(num_pages=num_pages, page_size=page_size, row_bytes=row_bytes, num_layers=num_layers, **more)


def rows_of(seed: int, n: int, row_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, row_bytes), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reads_what_was_written_last(data):
    num_pages, page_size, layers = 5, 3, 2
    slot = st.integers(-1, num_pages * page_size - 1)
    row_bytes = data.draw(st.sampled_from([1, 7, 656]))
    model: dict[tuple[int, int], torch.Tensor] = {}
    with make(num_pages, page_size, row_bytes, layers) as pool:
        for step in range(data.draw(st.integers(1, 6))):
            layer = data.draw(st.integers(0, layers - 1))
            slots = data.draw(st.lists(slot, max_size=8, unique_by=lambda s: (s, object()) if s < 0 else s))
            rows = rows_of(step, len(slots), row_bytes)
            pool.write(layer, slots, rows)
            model |= {(layer, s): row for s, row in zip(slots, rows, strict=True) if s >= 0}
            asked = data.draw(st.lists(slot, max_size=12))
            layer = data.draw(st.integers(0, layers - 1))
            nothing = torch.zeros(row_bytes, dtype=torch.uint8)
            expected = [model.get((layer, s), nothing) for s in asked]
            result = pool.read(layer, torch.tensor(asked, dtype=torch.int32))
            assert torch.equal(result, torch.stack(expected) if asked else nothing.new_empty(0, row_bytes))


def test_rows_in_several_pieces():
    """Pages of 24 MiB: two fit in a piece, and the fifth page has a piece of its own, of its size."""
    page = 2 * 3 * (4 << 20)
    with make(5, 2, 4 << 20) as pool:
        slots = torch.tensor([9, 0, -1, 4, 3])
        rows = rows_of(0, 5, 4 << 20)
        pool.write(1, slots[:1], rows[:1])
        assert pool.resident_bytes == page
        pool.write(1, slots, rows)
        assert pool.resident_bytes == 5 * page
        assert torch.equal(pool.read(1, slots)[[0, 1, 3, 4]], rows[[0, 1, 3, 4]])
        assert not pool.read(1, slots)[2].any()
        assert not pool.read(0, slots).any()
        assert not pool.read(1, [1, 2, 5, 6, 7, 8]).any()


def test_slots_beyond_two_gib():
    with make(40, 64, 1 << 20, 1) as pool:
        last = 40 * 64 - 1
        assert last * pool.row_bytes > 2**31
        row = rows_of(0, 1, 1 << 20)
        pool.write(0, torch.tensor([last], dtype=torch.int32), row)
        assert torch.equal(pool.read(0, [last]), row)
        assert not pool.read(0, [last - 1]).any()
        assert pool.resident_bytes == PIECE


@pytest.fixture
def mappings(monkeypatch):
    """Weak references to the memory mappings that pools make."""

    class Mapping(mmap.mmap):
        def __new__(cls, *args):
            mapping = super().__new__(cls, *args)
            made.append(weakref.ref(mapping))
            return mapping

    made: list[weakref.ref] = []
    monkeypatch.setattr("cptools.host_pool.mmap.mmap", Mapping)
    return made


def test_memory_is_taken_at_the_first_write_and_given_back_by_close(mappings):
    pool = make()
    pool.allocate(4)
    assert not pool.read(0, [0, 7]).any()
    pool.write(0, [-1], torch.ones(1, 8, dtype=torch.uint8))
    assert (pool.resident_bytes, mappings) == (0, [])
    pool.write(0, [0], torch.ones(1, 8, dtype=torch.uint8))
    assert pool.resident_bytes == 4 * 2 * 3 * 8
    assert [len(mapping()) for mapping in mappings] == [4 * 2 * 3 * 8]
    pool.close()
    pool.close()
    gc.collect()
    assert pool.resident_bytes == 0
    assert mappings[0]() is None


def test_collected_pool_gives_its_memory_back(mappings):
    pool = make()
    pool.page_view(0, 0)
    gc.collect()
    assert mappings[0]() is not None
    del pool
    gc.collect()
    assert mappings[0]() is None


def test_use_after_close_is_refused():
    pool = make()
    with pool:
        pages = pool.allocate(1)
    row = torch.zeros(1, 8, dtype=torch.uint8)
    for use in (
        lambda: pool.allocate(1),
        lambda: pool.retain(pages),
        lambda: pool.release(pages),
        lambda: pool.write(0, [0], row),
        lambda: pool.read(0, [0]),
        lambda: pool.page_view(0, 0),
        lambda: pool.__enter__(),
    ):
        with pytest.raises(ValueError, match="the pool is closed"):
            use()


def test_pages_are_counted():
    with make(num_pages=3) as pool:
        pages = pool.allocate(2)
        assert (pages, pool.num_pages, pool.num_free) == ([0, 1], 3, 1)
        with pytest.raises(PoolExhausted, match="2 pages wanted, 1 of 3 are free"):
            pool.allocate(2)
        pool.retain(pages)
        pool.release(pages)
        with pytest.raises(ValueError, match="page 2 is free"):
            pool.release([0, 2])
        assert pool.num_free == 1
        pool.release(pages)
        assert pool.num_free == 3


def test_page_view_is_the_memory_itself():
    with make() as pool:
        view = pool.page_view(1, 3)
        assert view.shape == (2, 8)
        assert not view.any()
        view.copy_(rows_of(0, 2, 8))
        assert torch.equal(pool.read(1, [6, 7]), view)
        assert not pool.read(1, list(range(6))).any()
        assert not pool.read(2, [6, 7]).any()
        pool.write(1, [7], torch.full((1, 8), 9, dtype=torch.uint8))
        assert view[1].tolist() == [9] * 8
        for page in (-1, 4):
            with pytest.raises(ValueError, match=f"page {page} is outside num_pages=4"):
                pool.page_view(0, page)


def test_out_is_filled_and_returned():
    with make() as pool:
        pool.write(0, [2, 5], rows_of(0, 2, 8))
        buffer = torch.full((3, 16), 255, dtype=torch.uint8)
        out = buffer[:, ::2]
        assert pool.read(0, [5, -1, 2], out=out) is out
        assert torch.equal(out[[2, 0]], rows_of(0, 2, 8))
        assert out[1].tolist() == [0] * 8
        assert (buffer[:, 1::2] == 255).all()


def test_rows_that_are_not_contiguous_are_written_right():
    with make() as pool:
        rows = rows_of(0, 4, 16)[::2, 1::2]
        pool.write(2, [6, 1], rows)
        assert torch.equal(pool.read(2, [6, 1]), rows)


def test_no_slots_are_legal():
    with make() as pool:
        for slots in ([], torch.empty(0, dtype=torch.int64), np.empty(0, dtype=np.int64)):
            pool.write(0, slots, torch.empty(0, 8, dtype=torch.uint8))
            assert pool.read(0, slots).shape == (0, 8)
    with make(num_pages=0) as pool:
        assert pool.allocate(0) == []
        assert pool.read(0, [-1]).tolist() == [[0] * 8]


def test_a_slot_written_twice_in_one_call_is_refused_and_nothing_written():
    with make() as pool:
        with pytest.raises(ValueError, match="slot 5 is named twice"):
            pool.write(0, [5, -1, 2, -1, 5], torch.ones(5, 8, dtype=torch.uint8))
        assert not pool.read(0, [2, 5, 5]).any()


@pytest.mark.parametrize(
    "slots, message",
    [
        ([8], r"slots from 8 to 8 are not all in \[-1, 4 pages \* 2 rows\)"),
        ([0, -2], "slots from -2 to 0"),
        ([0.5], "not .* of torch.float32"),
        ([True], "not .* of torch.bool"),
        (torch.tensor([0], dtype=torch.uint8), "of torch.uint8"),
        (torch.tensor(0), r"not \[\] of"),
        ([[0]], r"not \[1, 1\] of"),
    ],
)
def test_slots_that_are_none_are_refused(slots, message):
    with make() as pool:
        with pytest.raises(ValueError, match=message):
            pool.read(0, slots)
        with pytest.raises(ValueError, match=message):
            pool.write(0, slots, torch.zeros(1, 8, dtype=torch.uint8))


@pytest.mark.parametrize(
    "rows, message",
    [
        (torch.zeros(1, 7, dtype=torch.uint8), r"uint8 \[1, 8\] on the cpu, not torch.uint8 \[1, 7\]"),
        (torch.zeros(2, 8, dtype=torch.uint8), r"\[2, 8\]"),
        (torch.zeros(8, dtype=torch.uint8), r"\[8\]"),
        (torch.zeros(1, 8, dtype=torch.int8), "torch.int8"),
        (torch.zeros(1, 8, dtype=torch.uint8, device="meta"), "on meta"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with make() as pool:
        with pytest.raises(ValueError, match=message):
            pool.write(0, [0], rows)
        with pytest.raises(ValueError, match=message):
            pool.read(0, [0], out=rows)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_are_not_there_are_refused(layer):
    with make() as pool:
        for use in (
            lambda: pool.read(layer, [0]),
            lambda: pool.write(layer, [0], torch.zeros(1, 8, dtype=torch.uint8)),
            lambda: pool.page_view(layer, 0),
        ):
            with pytest.raises(ValueError, match=f"layer={layer} is outside num_layers=3"):
                use()


@pytest.mark.parametrize("name, value", [("num_pages", -1), ("page_size", 0), ("row_bytes", 0), ("num_layers", 0)])
def test_sizes_that_are_no_pool_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make(**{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_pinned_memory_without_cuda_is_refused():
    with pytest.raises(ValueError, match="pin_memory=True needs CUDA"):
        make(pin_memory=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pieces_are_pinned_and_unpinned():
    with make(5, 2, 4 << 20) as pool, make() as small, make() as other, make(pin_memory=False) as unpinned:
        for each in (pool, small, other, unpinned):
            view = each.page_view(1, each.num_pages - 1)
            assert view.is_pinned() == each.pin_memory == (each is not unpinned)
            rows = rows_of(0, 2, each.row_bytes)
            view.copy_(rows.cuda(), non_blocking=True)
            torch.cuda.synchronize()
            assert torch.equal(each.read(1, [2 * each.num_pages - 2, 2 * each.num_pages - 1]), rows)
    pool = make()
    pool.page_view(0, 0)
    del pool
    with make() as again:
        assert again.page_view(0, 0).is_pinned()


def test_sizes_that_are_no_integers_are_refused() -> None:
    for sizes in ({"num_pages": 2.5}, {"page_size": 2.5}, {"row_bytes": True}, {"num_layers": 1.0}):
        with pytest.raises(ValueError, match="integer"):
            HostKVPool(**{"num_pages": 2, "page_size": 2, "row_bytes": 8, **sizes})


def test_closed_pool_answers_nothing() -> None:
    pool = HostKVPool(num_pages=2, page_size=2, row_bytes=8)
    pool.close()
    for ask in (lambda: pool.num_free, lambda: pool.num_pages, lambda: pool.allocate(1)):
        with pytest.raises(ValueError, match="closed"):
            ask()
