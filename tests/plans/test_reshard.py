"""plan_reshard against moving tokens one by one."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools.layout import KVLayout
from cptools.reshard import Run, plan_reshard

SMALL = [KVLayout(n, i, i * b) for n, i, b in ((1, 1, 4), (2, 1, 4), (2, 2, 2), (3, 1, 1), (3, 4, 1), (4, 2, 1))]
PAIRS = list(itertools.product(SMALL, SMALL))


def greedy_runs(src: KVLayout, dst: KVLayout, start: int, stop: int) -> tuple[Run, ...]:
    """Rows of each pair of ranks in position order, each run made as long as it can be."""
    rows = defaultdict(list)
    for t in range(start, stop):
        rows[src.owner(t), dst.owner(t)].append((src.local_index(t), dst.local_index(t)))
    runs = []
    for (src_rank, dst_rank), indices in sorted(rows.items()):
        while indices:
            (a, b), count = indices[0], 1
            src_stride, dst_stride = (indices[1][0] - a, indices[1][1] - b) if len(indices) > 1 else (1, 1)
            while indices[count : count + 1] == [(a + count * src_stride, b + count * dst_stride)]:
                count += 1
            runs.append(Run(src_rank, a, src_stride, dst_rank, b, dst_stride, count))
            indices = indices[count:]
    return tuple(Run(r.src_rank, r.src_index, 1, r.dst_rank, r.dst_index, 1, 1) if r.count == 1 else r for r in runs)


def moved(src: KVLayout, dst: KVLayout, runs: tuple[Run, ...]) -> list[int]:
    """Positions that the runs move, in their order; each must arrive where `dst` wants it."""
    positions = []
    for run in runs:
        for i in range(run.count):
            position = src.position(run.src_rank, run.src_index + i * run.src_stride)
            assert dst.owner(position) == run.dst_rank
            assert dst.local_index(position) == run.dst_index + i * run.dst_stride
            positions.append(position)
    return positions


@pytest.mark.parametrize("src, dst", PAIRS, ids=str)
def test_all_small_ranges(src, dst):
    for start in range(0, 26, 5):
        for stop in range(start, start + 28):
            runs = plan_reshard(src, dst, start, stop)
            assert runs == greedy_runs(src, dst, start, stop)
            assert sorted(moved(src, dst, runs)) == list(range(start, stop))


layouts = st.builds(lambda n, i, b: KVLayout(n, i, i * b), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))


@settings(deadline=None)
@given(layouts, layouts, st.integers(0, 10**12), st.integers(0, 400))
def test_any_layouts(src, dst, start, length):
    runs = plan_reshard(src, dst, start, start + length)
    assert runs == greedy_runs(src, dst, start, start + length)
    assert sorted(moved(src, dst, runs)) == list(range(start, start + length))
    keys = [(run.src_rank, run.dst_rank, run.src_index) for run in runs]
    assert keys == sorted(keys)
    back = plan_reshard(dst, src, start, start + length)
    assert sorted(moved(dst, src, back)) == list(range(start, start + length))


def fewest_runs(rows: list[tuple[int, int]]) -> int:
    """Fewest constant-stride pieces of consecutive rows, by trying all cuts."""
    best = [0]
    for end in range(1, len(rows) + 1):
        options = []
        for begin in range(end):
            steps = {(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(rows[begin:end])}
            if len(steps) <= 1:
                options.append(best[begin] + 1)
        best.append(min(options))
    return best[-1]


@pytest.mark.parametrize("src, dst", PAIRS, ids=str)
def test_there_are_no_more_runs_than_needed(src, dst):
    rows = defaultdict(list)
    for t in range(3, 45):
        rows[src.owner(t), dst.owner(t)].append((src.local_index(t), dst.local_index(t)))
    assert len(plan_reshard(src, dst, 3, 45)) == sum(map(fewest_runs, rows.values()))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_round_robin_to_one_rank_and_back_are_n_runs(world_size):
    spread, whole = KVLayout(world_size), KVLayout(1)
    for start in range(world_size + 1):
        assert len(plan_reshard(spread, whole, start, start + 1000)) == world_size
        assert len(plan_reshard(whole, spread, start, start + 1000)) == world_size
        assert len(plan_reshard(spread, spread, start, start + 1000)) == world_size


def test_page_sizes_do_not_matter():
    assert plan_reshard(KVLayout(4, 2, 64), KVLayout(2, 1, 128), 5, 77) == plan_reshard(
        KVLayout(4, 2, 2), KVLayout(2, 1, 1), 5, 77
    )


def test_known_plan():
    assert plan_reshard(KVLayout(2), KVLayout(1), 0, 5) == (Run(0, 0, 1, 0, 0, 2, 3), Run(1, 0, 1, 0, 1, 2, 2))
    assert plan_reshard(KVLayout(2), KVLayout(1), 3, 5) == (Run(0, 2, 1, 0, 4, 1, 1), Run(1, 1, 1, 0, 3, 1, 1))


def test_empty_range_moves_nothing():
    assert plan_reshard(KVLayout(2), KVLayout(3), 7, 7) == ()


@pytest.mark.parametrize("start, stop", [(5, 4), (-1, 4), (-3, -2)])
def test_ranges_that_are_none_are_refused(start, stop):
    with pytest.raises(ValueError, match=f"start={start}, stop={stop}"):
        plan_reshard(KVLayout(2), KVLayout(1), start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 3.5), (0.5, 3), (True, 3), (0, "3")])
def test_bounds_that_are_no_integers_are_refused(start, stop) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        plan_reshard(KVLayout(2), KVLayout(1), start, stop)
