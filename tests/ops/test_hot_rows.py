"""The LRU of hot rows against a list that is kept by hand, and against bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools.kernels.hot_rows import FetchPlan, HotRegions, choose_resolve_hot_rows, fetch_rows, resolve_hot_rows
from cptools.layout import KVLayout


class ListLRU:
    """One region, as the docstring says it: a list of (hot slot, held index), the oldest first."""

    def __init__(self, hot_rows: int) -> None:
        self.slots = [(slot, -1) for slot in range(hot_rows)]

    def resolve(self, rows, gpu, host, hot, page):
        wanted, places = [], {}
        for index in [index for row in rows for index in row]:
            inside = 0 <= index < len(gpu) * page
            if inside and gpu[index // page] >= 0:
                places[index] = gpu[index // page] * page + index % page
            elif inside and host[index // page] >= 0 and index not in wanted:
                wanted.append(index)
        if wanted:
            hits = [entry for entry in self.slots if entry[1] in wanted]
            others = [entry for entry in self.slots if entry not in hits]
            missed = [index for index in wanted if index not in [held for _, held in hits]]
            taken = [(slot, index) for (slot, _), index in zip(others, missed, strict=False)]
            self.slots = others[len(missed) :] + taken + hits
            places |= {index: hot[slot // page] * page + slot % page for slot, index in taken + hits}
            fetched = [(host[index // page] * page + index % page, places[index]) for index in missed]
            counts = [len(hits), len(missed)]
        else:
            fetched, counts = [], [0, 0]
        return [[places.get(index, -1) for index in row] for row in rows], fetched, counts


def resolve(selected, regions, state, gpu, host, hot, page) -> FetchPlan:
    tables = {"gpu_tables": gpu, "host_tables": host, "hot_tables": hot}
    return resolve_hot_rows(
        torch.as_tensor(selected, dtype=torch.int64),
        torch.as_tensor(regions),
        state,
        **{name: torch.as_tensor(table, dtype=torch.int64) for name, table in tables.items()},
        page_size=page,
    )


def fetched(plan: FetchPlan, request: int) -> list[tuple[int, int]]:
    pairs = torch.stack([plan.sources[request], plan.targets[request]], 1).tolist()
    count = int(plan.counts[request, 1])
    assert all(pair == [-1, -1] for pair in pairs[count:])
    return [tuple(pair) for pair in pairs[:count]]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 6))
def test_resolver_equals_a_list(seed, rows, columns, page, spare):
    rng = np.random.default_rng(seed)
    blocks, hot_rows = int(rng.integers(1, 9)), rows * columns + spare
    hot_pages = -(-hot_rows // page)
    state = HotRegions.empty(3, hot_rows)
    ours = [ListLRU(hot_rows) for _ in range(3)]
    hot = 100 + rng.permutation(3 * hot_pages).reshape(3, hot_pages)
    regions = rng.permutation(3)[:2].tolist()
    host = rng.permutation(2 * blocks).reshape(2, blocks)
    for _ in range(8):
        gpu = np.where(rng.random((2, blocks)) < 0.3, 50 + np.arange(2 * blocks).reshape(2, blocks), -1)
        some_host = np.where(rng.random((2, blocks)) < 0.9, host, -1)
        selected = rng.integers(-1, blocks * page + 2, (2, rows, columns))
        plan = resolve(selected, regions, state, gpu, some_host, hot[regions], page)
        for r, region in enumerate(regions):
            want = ours[region].resolve(selected[r].tolist(), gpu[r], some_host[r], hot[region], page)
            assert (plan.slots[r].tolist(), fetched(plan, r), plan.counts[r].tolist()) == want
            slots, held = zip(*ours[region].slots, strict=True)
            assert tuple(state.order[region].tolist()) == slots
            assert tuple(state.held[region][list(slots)].tolist()) == held
        untouched = ({0, 1, 2} - set(regions)).pop()
        assert (state.held[untouched] == -1).all()
        for order in state.order.tolist():
            assert sorted(order) == list(range(hot_rows))


def test_rows_read_are_the_rows_written_and_followers_replay():
    """Three layers of one selection: each finds its own bytes, whatever was resident, hot or fetched."""
    rng = np.random.default_rng(7)
    page, blocks, hot_rows, layers, width = 4, 50, 24, 3, 16
    host_table, hot_table = rng.permutation(60)[:blocks], 60 + rng.permutation(6)
    host = torch.randint(256, (layers, 60 * page, width), dtype=torch.uint8)
    cache = torch.full((layers, 70 * page, width), 255, dtype=torch.uint8)
    gpu_table = np.where(rng.random(blocks) < 0.2, np.arange(blocks), -1)
    for block in np.flatnonzero(gpu_table >= 0):
        mine, theirs = gpu_table[block] * page, host_table[block] * page
        cache[:, mine : mine + page] = host[:, theirs : theirs + page]
    state = HotRegions.empty(1, hot_rows)
    hits = 0
    for _ in range(30):
        near = rng.integers(0, blocks * page - 30)
        selected = near + rng.integers(0, 30, (1, 2, 12))
        plan = resolve(selected, [0], state, gpu_table[None], host_table[None], hot_table[None], page)
        hits += int(plan.counts[0, 0])
        for layer in range(layers):
            fetch_rows(plan, host[layer], cache[layer])
        from_host = torch.from_numpy(host_table[selected // page] * page + selected % page)
        assert torch.equal(cache[:, plan.slots], host[:, from_host])
    assert hits


def test_verification_rows_do_not_evict_each_other():
    """Two rows of a request, nothing in common, and a region that holds just both, full of other rows."""
    state = HotRegions.empty(1, 8)
    tables = ([[-1] * 8], [list(range(8))], [[20, 21]])
    resolve([[[16, 17, 18, 19], [20, 21, 22, 23]]], [0], state, *tables, 4)
    plan = resolve([[[0, 1, 2, 3], [4, 5, 6, 7]]], [0], state, *tables, 4)
    assert len(set(plan.slots.flatten().tolist())) == 8
    assert plan.counts.tolist() == [[0, 8]]
    assert set(state.held[0].tolist()) == set(range(8))


def test_duplicates_take_one_slot_and_holes_none():
    state = HotRegions.empty(1, 6)
    plan = resolve([[[5, -1, 5], [3, 5, -1]]], [0], state, [[-1, -1]], [[0, 1]], [[9, 10]], 4)
    assert plan.slots.tolist() == [[[36, -1, 36], [37, 36, -1]]]
    assert fetched(plan, 0) == [(5, 36), (3, 37)]
    assert state.order[0].tolist() == [2, 3, 4, 5, 0, 1]


def test_padding_and_resident_rows_leave_the_order_alone():
    state = HotRegions.empty(2, 4)
    resolve([[[0, 1]]], [1], state, [[-1]], [[0]], [[7]], 4)
    before = [x.clone() for x in (state.held, state.order)]
    plan = resolve(
        [[[-1, -1]], [[2, 3]], [[0, 5]]], [-1, 1, -1], state, [[-1, -1], [4, -1], [3, -1]], [[-1, -1]] * 3, [[7]] * 3, 4
    )
    assert plan.slots.tolist() == [[[-1, -1]], [[18, 19]], [[12, -1]]]
    assert not plan.counts.any()
    assert all(torch.equal(a, b) for a, b in zip(before, (state.held, state.order), strict=True))


def test_more_rows_than_16_bits_number():
    hot_rows, page = 40_000, 64
    state = HotRegions.empty(1, hot_rows)
    hot = np.arange(hot_rows // page)[None]
    blocks = np.arange(4 * hot_rows // page)[None]
    for start in range(0, 2 * hot_rows, 8_000):
        selected = np.arange(start, start + 8_000).reshape(1, 4, 2_000)
        plan = resolve(selected, [0], state, np.full_like(blocks, -1), blocks, hot, page)
        assert plan.counts.tolist() == [[0, 8_000]]
        assert plan.slots[0].flatten().tolist() == [(start + i) % hot_rows for i in range(8_000)]
    assert sorted(state.order[0].tolist()) == list(range(hot_rows))
    assert resolve(selected, [0], state, np.full_like(blocks, -1), blocks, hot, page).counts.tolist() == [[8_000, 0]]


def test_each_rank_resolves_its_shard():
    """Local indices of two ranks: together they find each selected row once, and one page table serves both."""
    layout = KVLayout(2, 1, 4)
    positions = np.array([[[3, 8, 9, 17, 30]]])
    tables = ([[-1] * 4], [[3, 1, 0, 2]], [[5, 6]])
    found = np.zeros(positions.shape, int)
    for rank in range(2):
        local = np.where(layout.owner(positions) == rank, layout.local_index(positions), -1)
        plan = resolve(local, [0], HotRegions.empty(1, 8), *tables, 4)
        found += plan.slots.numpy() >= 0
        sources = [(tables[1][0][t // 8] * 4 + t % 8 // 2) for t in positions[0, 0] if t % 2 == rank]
        assert [source for source, _ in fetched(plan, 0)] == sources
    assert (found == 1).all()


def test_region_is_empty_for_its_next_request():
    state = HotRegions.empty(2, 4)
    tables = ([[-1]], [[0]], [[7]])
    resolve([[[0, 1]]], [1], state, *tables, 4)
    state.clear_(1)
    assert resolve([[[0, 1]]], [1], state, *tables, 4).counts.tolist() == [[0, 2]]


@pytest.mark.parametrize(
    "selected, regions, hot, message",
    [
        ([[[0] * 5]], [0], [[7, 8]], "1 x 5 rows may be wanted at once of 4 hot rows"),
        ([[[0]]], [0], [[]], "4 hot rows in 0 pages"),
        ([[[0]]], [2], [[7]], "regions .2. of 2"),
        ([[[0]], [[0]]], [1, 1], [[7], [7]], "each may be used once"),
        ([[[0]]], [0, 1], [[7]], "regions .R."),
    ],
)
def test_what_does_not_fit_is_refused(selected, regions, hot, message):
    state = HotRegions.empty(2, 4)
    tables = [[-1]] * len(selected)
    with pytest.raises(ValueError, match=message):
        resolve(selected, regions, state, tables, tables, hot, 4)
    assert (state.held == -1).all()


def test_only_the_reference_runs_yet():
    assert choose_resolve_hot_rows().impl == "reference"
    with pytest.raises(ValueError, match="triton"):
        choose_resolve_hot_rows(impl="triton")
