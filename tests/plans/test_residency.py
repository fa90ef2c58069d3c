"""Residency, decision by decision."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cptools.layout import KVLayout
from cptools.residency import CopyDone, CopyKind, PageEvent, PageRun, PageState, Residency, ResidencySizes
from cptools.residency.copies import page_runs
from cptools.residency.states import TRANSITIONS, IllegalTransition, after

BLOCK = 4


def make(*, gpu=8, index=100, host=100, tokens=100, step=8, hot=1, ranks=1, **options) -> Residency:
    layout = KVLayout(ranks, 1, BLOCK // ranks)
    return Residency(
        ResidencySizes(
            layout=layout,
            gpu_pages=gpu,
            index_pages=index,
            host_pages=host,
            max_tokens=tokens,
            max_step_tokens=step,
            top_k=hot * layout.page_size,
            **options,
        )
    )


class Engine:
    """Grants become rows at once; copies wait in `copies` until `report`."""

    def __init__(self, residency: Residency) -> None:
        self.residency, self.copies, self.plans = residency, [], []

    def add(self, tokens: int, **shared) -> int:
        """Add a request; with room, let it run and fill its prompt."""
        request = self.residency.add(tokens, **shared)
        self.pass_({})
        while request in self.residency.running and (left := tokens - self.residency.tokens(request)):
            if not self.grow(request, min(left, self.residency.sizes.max_step_tokens)):
                break
        return request

    def pass_(self, rows):
        plan = self.residency.schedule(rows)
        self.plans.append(plan)
        self.copies += plan.copies
        for request in plan.granted:
            self.residency.commit(request, rows[request])
        return plan

    def grow(self, request: int, rows: int) -> bool:
        return request in self.pass_({request: rows}).granted

    def report(self, ok: bool = True) -> None:
        for plan in self.copies:
            for rank in range(self.residency.sizes.layout.world_size):
                self.residency.completed(CopyDone(plan.copy, rank, ok))
        self.copies.clear()

    def grow_to(self, request: int, tokens: int, passes: int = 200) -> None:
        for _ in range(passes):
            left = tokens - self.residency.tokens(request)
            if not left:
                return
            rows = {request: min(left, self.residency.sizes.max_step_tokens)}
            self.pass_(rows if request in self.residency.running else {})
            self.report()
        pytest.fail(f"request {request} has {self.residency.tokens(request)} of {tokens} tokens after {passes} passes")

    def states(self, request: int) -> str:
        return " ".join(block.state.name for block in self.residency.roster.requests[request].blocks)


def test_nothing_moves_while_there_is_room():
    engine = Engine(make(gpu=30))
    requests = [engine.add(10) for _ in range(5)]
    while engine.residency.tokens(requests[0]) < 20:
        assert all(engine.grow(request, 1) for request in requests)
    assert not any(plan.copies or plan.hot or plan.preempted for plan in engine.plans)
    assert engine.residency.counters.dropped == 0


def test_a_long_request_needs_few_gpu_pages():
    """Rows leave as they come: 25 blocks through 12 pages, of which one is the hot region, the last two the tail."""
    engine = Engine(make(gpu=12, host=40, copy_pages=4))
    request = engine.residency.add(100)
    engine.grow_to(request, 100)
    places = engine.residency.places(request)
    assert len(places.hot_pages) == 1
    assert min(places.gpu_pages[-2:]) >= 0
    assert places.gpu_pages.count(-1) >= 25 - 11
    assert all(max(gpu, host) >= 0 for gpu, host in zip(places.gpu_pages, places.host_pages, strict=True))
    assert min(places.index_pages) >= 0
    engine.residency.finish(request)
    store = engine.residency.roster.store
    assert (store.gpu.num_free, store.index.num_free, store.host.num_free) == (12, 100, 40)


def test_a_page_is_dropped_only_when_every_rank_has_copied_it():
    engine = Engine(make(gpu=14, ranks=2, host=40, index=40))
    request = engine.residency.add(100)
    wanting = lambda: {request: 4} if request in engine.residency.running else {}
    while len(engine.plans) < 30:
        engine.pass_(wanting())
    assert not engine.plans[-1].granted
    (copy,) = engine.copies
    assert copy.kind is CopyKind.MIRROR
    engine.residency.completed(CopyDone(copy.copy, 1))
    for _ in range(5):
        assert not engine.pass_(wanting()).granted
    assert engine.residency.counters.dropped == 0
    engine.residency.completed(CopyDone(copy.copy, 0))
    assert engine.pass_(wanting()).granted
    assert engine.residency.counters.dropped > 0


def test_copies_move_large_runs():
    engine = Engine(make(gpu=20, host=60, tokens=80))
    source = engine.add(64)
    engine.residency.finish(source, keep_blocks=16)
    engine.residency.add(40)
    (copy,) = engine.pass_({}).copies
    assert copy.rows == copy.index == (PageRun(0, 0, 16),)


def test_the_page_being_written_and_rejected_drafts_are_not_mirrored():
    residency = make(gpu=20, host=60, watermark=18)
    request = residency.add(19)
    residency.schedule({})
    for rows in (8, 8, 3):
        residency.schedule({request: rows})
        residency.commit(request, rows)
    residency.schedule({request: 4})
    residency.commit(request, 4, accepted=0)
    plans = [residency.schedule({}) for _ in range(3)]
    mirrored = sum(run.count for plan in plans for copy in plan.copies for run in copy.rows)
    assert mirrored <= 4  # of 4 complete blocks
    blocks = residency.roster.requests[request].blocks
    assert all(block.state is PageState.DIRTY for block in blocks[4:])


def test_accepted_rows_count_and_rejected_ones_are_written_again():
    residency = make(gpu=30)
    request = residency.add(6)
    residency.schedule({})
    residency.schedule({request: 6})
    residency.commit(request, 6)
    residency.schedule({request: 4})
    residency.schedule({request: 4})  # a step ahead: the host has not seen what was accepted
    assert len(residency.places(request).gpu_pages) == 4
    residency.commit(request, 4, 1)
    residency.commit(request, 4, 4)
    assert residency.tokens(request) == 11
    residency.schedule({request: 4})
    assert len(residency.places(request).gpu_pages) == 4


def test_full_pools_make_requests_wait_in_order_of_arrival():
    engine = Engine(make(gpu=8, host=0, tokens=32))
    first, second, third = engine.add(20), engine.residency.add(20), engine.residency.add(1)
    assert engine.residency.queue == (second, third)
    for _ in range(3):
        plan = engine.pass_({})
        assert (plan.admitted, plan.copies, plan.preempted) == ((), (), ())
    engine.residency.finish(first)
    assert [each.request for each in engine.pass_({}).admitted] == [second, third]


def test_a_pool_full_of_clean_pages_admits_by_reclaim():
    """Only looking at free pages would never spill anything (vLLM 56109)."""
    engine = Engine(make(gpu=12, host=40, tokens=60, copy_pages=4))
    old = engine.residency.add(60)
    engine.grow_to(old, 60)
    new = engine.residency.add(4)
    for _ in range(20):
        engine.pass_({})
        engine.report()
    assert engine.residency.running == (old, new)


def test_adoptable_copies_are_counted_at_admission():
    """A prefix whose pages count as free must not be promised twice: to be kept, and to be taken (vLLM 57457)."""
    engine = Engine(make(gpu=10, host=40, tokens=40, index=40))
    source = engine.add(25)
    prefix = engine.residency.finish(source, keep_blocks=6)
    other = engine.add(12)
    # 1 page is free. Mirror the prefix, so that its 6 pages can be had.
    blocker = engine.residency.add(20)
    engine.pass_({})
    engine.report()
    engine.residency.abort(blocker)
    store = engine.residency.roster.store
    assert (store.gpu.num_free, len(store.evictable)) == (1, 6)
    wants_all = engine.residency.add(24 + 4 * 2, shares=prefix, blocks=6)  # 6 of the 7 are its own, and 2 are new
    plan = engine.pass_({})
    assert wants_all in engine.residency.queue
    assert not plan.admitted
    engine.residency.finish(other)
    assert [each.cached_tokens for each in engine.pass_({}).admitted] == [24]


def test_rows_do_not_move_for_want_of_index_pages():
    """Spilling rows would give no index page."""
    engine = Engine(make(gpu=60, host=60, index=30, tokens=80))
    engine.add(80)
    waiting = engine.residency.add(80)
    for _ in range(5):
        engine.pass_({})
    assert engine.residency.queue == (waiting,)
    assert not any(plan.copies or plan.hot for plan in engine.plans)


def test_a_prefix_in_host_memory_is_reused():
    """Two requests share a prefix, whose pages were dropped in between (SGLang 32314)."""
    engine = Engine(make(gpu=9, host=40, tokens=36))
    source = engine.add(21)
    prefix = engine.residency.finish(source, keep_blocks=5)
    big = engine.residency.add(32)
    engine.grow_to(big, 32)
    assert engine.residency.counters.dropped >= 4
    engine.residency.finish(big)
    again = engine.residency.add(21, shares=prefix, blocks=5)
    plan = engine.pass_({})
    (copy,) = plan.copies
    assert (copy.kind, plan.admitted) == (CopyKind.FETCH, ())
    engine.report()
    (admitted,) = engine.pass_({}).admitted
    assert (admitted.request, admitted.cached_tokens) == (again, 20)
    assert engine.grow(again, 1)


def test_shared_blocks_are_whole_and_leave_something_to_compute():
    engine = Engine(make(gpu=20))
    source = engine.add(9)
    assert engine.residency.shareable(source) == 2
    with pytest.raises(ValueError, match="blocks=3, but 1 has 2 complete ones"):
        engine.residency.add(50, shares=source, blocks=3)
    with pytest.raises(ValueError, match="blocks=2 leave nothing to compute of known_tokens=8"):
        engine.residency.add(8, shares=source, blocks=2)
    assert engine.residency.queue == ()
    second = engine.add(9, shares=source, blocks=2)
    places = [engine.residency.places(request).gpu_pages for request in (source, second)]
    assert places[0][:2] == places[1][:2]
    assert places[0][2] != places[1][2]
    engine.residency.finish(source)
    assert engine.residency.places(second).gpu_pages == places[1]


def test_pages_of_a_copy_under_way_outlive_the_request():
    """The request ends while its copies are in flight; nobody gets their pages before they report (SGLang 26246)."""
    engine = Engine(make(gpu=8, host=8, tokens=32, watermark=8))
    request = engine.add(30)
    prefix = engine.residency.finish(request, keep_blocks=6)
    engine.pass_({})
    store = engine.residency.roster.store
    (copy,) = engine.copies
    assert copy.rows == (PageRun(0, 0, 6),)
    engine.residency.forget(prefix)
    assert (store.gpu.num_free, store.host.num_free) == (2, 2)
    waiting = engine.residency.add(4 * 8)
    assert not engine.pass_({}).admitted
    engine.report()
    assert store.gpu.num_free == 8
    assert [each.request for each in engine.pass_({}).admitted] == [waiting]


def test_preemption_keeps_rows_in_host_memory():
    """The oldest request grows past what is there: the youngest gives way, and goes on where it was."""
    engine = Engine(make(gpu=8, host=20, tokens=32))
    old, young = engine.add(8), engine.add(14)
    engine.grow_to(old, 28)
    assert any(plan.preempted == (young,) for plan in engine.plans)
    assert engine.residency.counters.recomputed_tokens == 0
    assert engine.residency.tokens(young) == 14
    engine.residency.finish(old)
    engine.grow_to(young, 20)
    assert engine.residency.counters.fetched >= 1


def test_without_a_host_pool_the_youngest_computes_again():
    engine = Engine(make(gpu=8, host=0, tokens=32))
    old, young = engine.add(8), engine.add(14)
    engine.grow_to(old, 28)
    assert engine.residency.queue == (young,)
    assert engine.residency.tokens(young) < 14
    assert engine.residency.counters.recomputed_tokens == 14 - engine.residency.tokens(young)
    engine.residency.finish(old)
    plan = engine.pass_({})
    assert plan.admitted[0].cached_tokens == engine.residency.tokens(young)


def test_rows_come_back_when_there_is_room_again():
    engine = Engine(make(gpu=24, host=60, tokens=80))
    big = engine.residency.add(60)
    engine.grow_to(big, 60)
    other = engine.residency.add(60)
    engine.grow_to(other, 60)
    assert -1 in engine.residency.places(big).gpu_pages
    engine.residency.finish(other)
    for _ in range(20):
        engine.pass_({})
        engine.report()
    places = engine.residency.places(big)
    assert -1 not in places.gpu_pages
    assert places.hot_pages == ()


def test_a_failed_copy_changes_nothing():
    engine = Engine(make(gpu=20, host=60, watermark=18))
    request = engine.add(40)
    engine.pass_({})
    before = engine.residency.places(request)
    engine.report(ok=False)
    assert "COPYING" not in engine.states(request)
    assert engine.residency.places(request) == before
    assert engine.residency.roster.store.host.num_free == 60
    engine.pass_({})
    assert engine.copies


def test_a_damaged_host_page_is_a_miss():
    """A checksum does not match: nobody gets these bytes, and only what lay from there on is computed again."""
    engine = Engine(make(gpu=9, host=40, tokens=36))
    source = engine.add(21)
    prefix = engine.residency.finish(source, keep_blocks=5)
    big = engine.residency.add(32)
    engine.grow_to(big, 32)
    engine.residency.finish(big)
    again = engine.residency.add(21, shares=prefix, blocks=5)
    (copy,) = engine.pass_({}).copies
    held = [block.host_page for block in engine.residency.roster.requests[again].blocks]
    assert held[2] in [run.source + i for run in copy.rows for i in range(run.count)]
    with pytest.raises(ValueError, match=r"damaged=.77"):
        engine.residency.completed(CopyDone(copy.copy, 0, damaged=(77,)))
    engine.residency.completed(CopyDone(copy.copy, 0, damaged=(held[2],)))
    assert engine.residency.queue == (again,)
    assert engine.residency.shareable(prefix) == 2
    plan = engine.pass_({})
    assert plan.preempted == (again,)
    assert [each.cached_tokens for each in plan.admitted] == [8]
    assert engine.residency.counters.damaged == 1
    assert engine.residency.counters.recomputed_tokens == 12


def test_damage_waits_for_the_steps_of_a_running_request():
    """Found damaged while a request reads it through its hot region: that one gets no more rows, and goes back once its
    steps are over."""
    engine = Engine(make(gpu=16, host=60, tokens=100, step=8))
    reader = engine.residency.add(84)
    engine.grow_to(reader, 84)
    assert engine.residency.places(reader).gpu_pages[1] == -1
    other = engine.residency.add(12, shares=reader, blocks=2)
    while not any(copy.kind is CopyKind.FETCH for copy in engine.copies):
        assert len(engine.plans) < 50
        engine.report()
        engine.pass_({})
    (copy,) = engine.copies
    plan = engine.residency.schedule({reader: 3})
    assert plan.granted == (reader,)
    damaged = engine.residency.places(reader).host_pages[1]
    engine.residency.completed(CopyDone(copy.copy, 0, damaged=(damaged,)))
    assert engine.residency.shareable(reader) == 1
    plan = engine.residency.schedule({reader: 2})
    assert (plan.granted, plan.waiting, plan.preempted) == ((), (reader,), (other,))
    engine.residency.commit(reader, 3)
    plan = engine.residency.schedule({reader: 2})
    assert plan.preempted == (reader,)
    assert engine.residency.tokens(reader) == 4


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r, id: r.schedule({id: 9}), "9 rows more make 9 outstanding behind 3"),
        (lambda r, id: r.schedule({id: -1}), "rows of request 1=-1"),
        (lambda r, id: r.schedule({99: 1}), "request 99 is not there"),
        (lambda r, id: r.schedule({id + 1: 1}), "request 2 does not run: in the queue"),
        (lambda r, id: r.commit(id, 1), "rows=1 of 0 outstanding"),
        (lambda r, id: r.completed(CopyDone(5, 0)), "copy 5 is not under way"),
        (lambda r, id: r.preempt(id + 1), "request 2 does not run"),
        (lambda r, id: r.finish(id, keep_blocks=1), "keep_blocks=1, request 1 has 0 complete ones"),
        (lambda r, id: r.forget(7), "no prefix 7 is kept"),
        (lambda r, id: r.add(101), "known_tokens=101 exceeds max_tokens=100"),
        (lambda r, id: r.add(10, shares=77, blocks=1), "blocks=1, but 77 has 0"),
        (lambda r, id: r.add(0), "known_tokens=0"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(call, message):
    residency = make(gpu=12, host=40)
    request = residency.add(3)
    residency.schedule({})
    residency.schedule({request: 3})
    residency.commit(request, 3)
    residency.add(5)
    before = (residency.places(request), residency.tokens(request), residency.queue, residency.counters)
    with pytest.raises(ValueError, match=message):
        call(residency, request)
    assert (residency.places(request), residency.tokens(request), residency.queue, residency.counters) == before


def test_a_rank_reports_once():
    engine = Engine(make(gpu=20, host=60, ranks=2, watermark=18))
    engine.add(40)
    engine.pass_({})
    copy = engine.copies[0].copy
    engine.residency.completed(CopyDone(copy, 1))
    for rank in (1, 2):
        with pytest.raises(ValueError, match=f"copy {copy} does not wait for rank {rank}, but for .0."):
            engine.residency.completed(CopyDone(copy, rank))


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"hot_rows": 3}, "hot_rows=3 must hold query_rows=1 . top_k=4"),
        ({"index": 24}, "index_pages=24, but max_tokens=100 are 25 blocks"),
        ({"host": 10}, "25 blocks: neither gpu_pages=8 hold them, nor with host_pages=10"),
        ({"step": 101}, "max_step_tokens=101 exceeds max_tokens=100"),
        ({"gpu": 0}, "gpu_pages=0"),
        ({"host": -1}, "host_pages=-1"),
    ],
)
def test_sizes_that_hold_no_request_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sizes_that_are_accepted_hold_the_longest_request(data):
    draw = lambda low, high: data.draw(st.integers(low, high))
    tokens = draw(1, 80)
    try:
        residency = make(
            gpu=draw(1, 20), index=20, host=draw(0, 40), tokens=tokens, step=draw(1, min(tokens, 12)), hot=draw(1, 4),
            tail_pages=draw(1, 3), watermark=draw(0, 6), copy_pages=draw(1, 5),
        )  # fmt: skip
    except ValueError:
        assume(False)
    engine = Engine(residency)
    request = residency.add(draw(1, tokens))
    engine.grow_to(request, tokens, passes=600)


@given(st.lists(st.integers(0, 60), unique=True), st.randoms(use_true_random=False))
def test_runs_move_each_page_once_and_are_maximal(sources, random):
    targets = random.sample(range(100), len(sources))
    if random.random() < 0.5:
        targets.sort()
        sources = sorted(sources)
    runs = page_runs(zip(sources, targets, strict=True))
    moved = [(run.source + i, run.target + i) for run in runs for i in range(run.count)]
    assert sorted(moved) == sorted(zip(sources, targets, strict=True))
    for a, b in itertools.pairwise(runs):
        assert a.source + a.count <= b.source
        assert (a.source + a.count, a.target + a.count) != (b.source, b.target)
    assert page_runs([(3, 7), (4, 8), (5, 1)]) == (PageRun(3, 7, 2), PageRun(5, 1, 1))


def test_what_the_table_does_not_have_is_refused():
    legal = {(state, event) for state in PageState for event in PageEvent if (state, event) in TRANSITIONS}
    assert len(legal) == len(TRANSITIONS)
    with pytest.raises(IllegalTransition, match="DROP in state COPYING"):
        after(PageState.COPYING, PageEvent.DROP)
    # A page leaves the GPU from one state alone, which only a complete host copy leads to.
    assert [state for state, event in TRANSITIONS if event is PageEvent.DROP] == [PageState.EVICTABLE]
    for (state, _), to in TRANSITIONS.items():
        assert to.on_gpu or to.on_host
        assert state.on_host or not to.on_host or state is PageState.COPYING


def test_a_million_tokens_on_a_few_gpu_pages():
    """2^20 tokens, chunks of 8192, hot rows for MTP3: 16,384 blocks, of which the GPU holds a small part at a time."""
    sizes = ResidencySizes(
        layout=KVLayout(1, 1, 64),
        gpu_pages=1024,
        index_pages=16_500,
        host_pages=16_500,
        max_tokens=2**20 + 64,
        max_step_tokens=8192,
        query_rows=4,
        watermark=256,
    )
    engine = Engine(Residency(sizes))
    request = engine.residency.add(2**20)
    engine.grow_to(request, 2**20, passes=500)
    places = engine.residency.places(request)
    assert len(places.gpu_pages) == 2**14
    assert len(places.hot_pages) == 128
    assert sum(page >= 0 for page in places.gpu_pages) <= 1024 - 128
    assert all(max(gpu, host) >= 0 for gpu, host in zip(places.gpu_pages, places.host_pages, strict=True))
