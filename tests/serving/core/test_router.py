"""`Router`: what a choice costs, who gets it, and what faults leave on the books."""

from dataclasses import replace

import pytest

from serving.core.engine_load import EngineState
from serving.core.kv_events import BlockStored, EventBatch, Tier
from serving.core.route_choice import RoutePolicy, RouteRequest
from serving.core.route_cost import EngineProfile, PrefillCost, Role
from serving.core.router import NoEngine, Router
from serving.core.sessions import Sessions

BLOCK = 64
COST = PrefillCost(per_token=1e-4, per_pair=1e-9)


class Fleet:
    """A router with engines of one kind and a clock set by hand."""

    def __init__(self, profiles, **policy):
        self.now = 0.0
        self.router = Router(profiles, lambda: self.now, RoutePolicy(**{"block_tokens": BLOCK, **policy}))
        self.count = 0

    def route(self, hashes, *, tokens=None, **more):
        self.count += 1
        tokens = len(hashes) * BLOCK + 1 if tokens is None else tokens
        return self.router.route(RouteRequest(f"r{self.count}", tokens, hashes, **more))

    def send(self, hashes, **more):
        decision = self.route(hashes, **more)
        self.router.dispatch(decision)
        return decision


def whole(count, **more):
    return Fleet([EngineProfile(f"e{i}", prefill=COST) for i in range(count)], **more)


def split(prefills=2, decodes=2, decode_prefill=COST, **policy):
    rates = {"kv_bytes_per_token": 50_000, "transfer_bytes_per_second": 1e11, "host_bytes_per_second": 2e10}
    return Fleet(
        [EngineProfile(f"p{i}", Role.PREFILL, COST, **rates) for i in range(prefills)]
        + [
            EngineProfile(f"d{i}", Role.DECODE, decode_prefill, decode_tokens_per_second=1e9, **rates)
            for i in range(decodes)
        ],
        **policy,
    )


def chain(name, blocks, behind=()):
    return [*behind, *((name, i) for i in range(blocks))]


def test_prefill_cost_counts_tokens_and_pairs():
    assert COST.seconds(0, 100) == 0.0
    assert COST.seconds(3, 10) == pytest.approx(3e-4 + (30 + 6) * 1e-9)
    samples = [(n, c, COST.seconds(n, c)) for n, c in [(1000, 0), (8000, 0), (8000, 100_000), (2000, 900_000)]]
    fitted = PrefillCost.fit(samples)
    assert (fitted.per_token, fitted.per_pair) == pytest.approx((1e-4, 1e-9), rel=1e-9)
    with pytest.raises(ValueError, match="rank 1"):
        PrefillCost.fit(samples[:1])
    with pytest.raises(ValueError, match="per_pair=-"):
        PrefillCost.fit([(1000, 0, 0.1), (8000, 0, 0.1)])
    with pytest.raises(ValueError, match="seconds > 0"):
        PrefillCost.fit([(1000, 0, 0.0)])
    with pytest.raises(ValueError, match="per_token=-1"):
        PrefillCost(per_token=-1)


def test_prefix_attracts_until_the_queue_costs_more_than_computing_it_again():
    fleet = whole(2, delay_weight=0.0)
    history = chain("h", 1000)  # 64,000 tokens: 8.4 s to compute
    fleet.router.index.store("e1", Tier.GPU, history)
    again = COST.seconds(64_001, 0) - COST.seconds(1, 64_000)
    fleet.router.load("e1").prefills["other"] = again - 0.1
    assert fleet.route(history).prefill == "e1"
    fleet.router.load("e1").prefills["other"] = again + 0.1
    assert fleet.route(history).prefill == "e0"
    fleet.router.policy = replace(fleet.router.policy, delay_weight=1.0)  # computing again keeps others waiting too
    assert fleet.route(history).prefill == "e1"


def test_host_memory_costs_its_bandwidth():
    fleet = Fleet(
        [
            EngineProfile("slow", prefill=COST, kv_bytes_per_token=50_000, host_bytes_per_second=1e8),
            EngineProfile("fast", prefill=COST, kv_bytes_per_token=50_000, host_bytes_per_second=1e11),
        ],
    )
    history = chain("h", 100)
    for engine in ("slow", "fast"):
        fleet.router.index.store(engine, Tier.HOST, history)
    decision = fleet.route(history)
    assert decision.prefill == "fast"
    best, other = decision.decode_candidates
    assert best.host_tokens == best.cached_tokens == 6400
    assert best.restore_seconds == pytest.approx(6400 * 50_000 / 1e11)
    assert other.restore_seconds == pytest.approx(6400 * 50_000 / 1e8)


def test_explanation_holds_the_numbers():
    fleet = split(local_prefill_tokens=100)
    fleet.router.index.store("p1", Tier.GPU, chain("h", 10))
    decision = fleet.send(chain("h", 20))
    text = decision.explain()
    assert decision.prefill == "p1"
    assert "request r1: 1281 tokens; p1 computes 641 tokens, d0 lacks 1281" in text
    lines = text.splitlines()
    assert lines[1].startswith(
        "  prefill -> p1: 0.129 s = prefill 0.065 others 0.065; 640 cached (0 in host memory), 641 new"
    )
    assert lines[2].startswith("  prefill    p0: 0.258 s")
    assert lines[3].startswith("  decode -> d0: ")
    assert len(lines) == 5
    fleet.router.speculation.drop_engine("d0")
    fleet.router.events["p1"].receive(3, EventBatch(0.0, ()))
    assert "events missing" in fleet.route(chain("h", 20)).explain()


def test_equal_costs_go_round_and_the_same_calls_decide_alike():
    def names():
        fleet = whole(3)
        decisions = []
        for i in range(7):
            decisions.append(fleet.send(chain(f"new{i}", 5)).prefill)
            fleet.router.finish(f"r{i + 1}")
        return decisions

    assert names() == names() == ["e0", "e1", "e2", "e0", "e1", "e2", "e0"]


def test_burst_of_siblings_sticks_before_any_event():
    fleet = whole(4)
    trunk = chain("trunk", 500)
    engines = {fleet.send(chain(f"agent{i}", 2, behind=trunk)).prefill for i in range(8)}
    assert len(engines) == 1
    fleet.now = 1e6  # no event ever came: nothing is believed any more
    assert all(cost.cached_tokens == 0 for cost in fleet.route(trunk).decode_candidates)


def test_speculation_lasts_as_long_as_the_prefill():
    fleet = whole(2)
    trunk = chain("trunk", 5000)
    first = fleet.send(trunk)
    fleet.now = first.prefill_cost.prefill_seconds + 1.0
    assert fleet.route(trunk).prefill_cost.cached_tokens == 320_000
    fleet.now += 1.5
    assert fleet.route(trunk).prefill_cost.cached_tokens == 0


def test_shared_system_prompt_does_not_collapse_on_one_engine():
    fleet = whole(4)
    system = chain("system", 40)
    counts = dict.fromkeys(fleet.router.events, 0)
    for i in range(40):
        counts[fleet.send(chain(f"user{i}", 400, behind=system)).prefill] += 1
    assert set(counts.values()) == {10}


def test_affinity_is_a_bonus_that_yields_to_load():
    fleet = whole(3, affinity_seconds=0.5)
    assert fleet.send(chain("a", 4), session="s").prefill == "e0"
    fleet.router.finish("r1")
    assert fleet.send(chain("b", 4), session="other").prefill == "e1"
    assert fleet.route(chain("c", 4), session="s").prefill == "e0"
    fleet.router.load("e0").prefills["long"] = 0.6
    assert fleet.route(chain("c", 4), session="s").prefill == "e2"


def test_short_tails_are_computed_where_they_are_decoded():
    fleet = split(local_prefill_tokens=200)
    history = chain("h", 100)
    fleet.router.index.store("d1", Tier.GPU, history)
    short = fleet.send(history, tokens=6400 + 63)
    assert (short.prefill, short.decode, short.remote_prefill) == ("d1", "d1", False)
    assert short.reason == "d1 computes 63 < 200 tokens itself"
    assert fleet.router.load("d1").queue_seconds == pytest.approx(COST.seconds(63, 6400))
    long = fleet.send([*history, *chain("more", 4)], tokens=6400 + 300)
    assert (long.decode, long.remote_prefill) == ("d1", True)
    assert fleet.router.load(long.prefill).queue_seconds > 0
    never = split(local_prefill_tokens=0)
    assert never.route([], tokens=1).remote_prefill
    unable = split(local_prefill_tokens=200, decode_prefill=None)
    assert unable.route([], tokens=1).remote_prefill


def test_decode_engine_that_has_the_prefix_pulls_less():
    fleet = split()
    fleet.router.index.store("d1", Tier.GPU, chain("h", 4000))
    decision = fleet.route(chain("h", 4001))
    assert decision.decode == "d1"
    assert decision.decode_candidates[0].transfer_seconds == pytest.approx(65 * 50_000 / 1e11)
    fleet.router.load("d1").contexts["big"] = 100_000_000  # now every step there reads much
    assert fleet.route(chain("h", 4001)).decode == "d0"


def test_without_prefill_engines_decode_engines_compute_prompts_or_refuse():
    fleet = split(prefills=1)
    fleet.router.lost("p0")
    decision = fleet.route(chain("h", 100))
    assert not decision.remote_prefill
    assert decision.reason == "no prefill engine is ready, d0 computes 6401 tokens"
    unable = split(prefills=1, decode_prefill=None)
    unable.router.drain("p0")
    with pytest.raises(NoEngine, match="d0 ready, d1 ready, p0 draining") as refused:
        unable.route(chain("h", 1))
    assert refused.value.retry_after is None


def test_states_and_bounds_say_who_takes_requests():
    fleet = Fleet([EngineProfile(f"e{i}", prefill=COST, max_requests=2) for i in range(2)])
    fleet.router.drain("e0")
    assert [fleet.send(chain(f"n{i}", 10 + i)).prefill for i in range(2)] == ["e1", "e1"]
    with pytest.raises(NoEngine, match="all 1 engines for both are full") as full:
        fleet.route([], tokens=5)
    assert full.value.retry_after == pytest.approx(COST.seconds(641, 0) + COST.seconds(705, 0))
    fleet.router.ready("e0")
    assert fleet.route([], tokens=5).prefill == "e0"
    fleet.router.drain("e0")
    fleet.router.lost("e1")
    with pytest.raises(NoEngine, match="no engine for both is ready: e0 draining, e1 down") as none:
        fleet.route([], tokens=5)
    assert none.value.retry_after is None


def test_books_are_empty_after_every_way_to_end():
    fleet = split()
    for end in range(5):
        decision = fleet.send(chain(f"n{end}", 50), session="s")
        name, loads = (
            decision.request.request_id,
            [fleet.router.load(decision.prefill), fleet.router.load(decision.decode)],
        )
        assert (loads[0].queue_seconds > 0, loads[1].context_tokens) == (True, 3201 + 256)
        if end == 1:
            before = loads[0].queue_seconds
            fleet.router.progress(name, 1000)
            assert loads[0].queue_seconds == pytest.approx(COST.seconds(1000, 2201))
            assert loads[0].queue_seconds < before
        if end == 2:
            fleet.router.first_token(name)
            assert loads[0].queue_seconds == 0
            fleet.router.progress(name, 10)
            assert loads[0].queue_seconds == 0
        if end == 3:
            assert fleet.router.lost(decision.decode) == (name,)
            fleet.router.ready(decision.decode)
        assert fleet.router.finish(name, stored=end != 4) == (end != 3)
        assert not fleet.router.finish(name)
        fleet.router.first_token(name)  # too late, and no matter
        assert [(load.queue_seconds, load.context_tokens, load.requests) for load in loads] == [(0, 0, set())] * 2
    assert fleet.router.outstanding == ()
    assert all(cost.cached_tokens == 0 for cost in fleet.route(chain("n4", 50)).prefill_candidates)


def test_lost_engine_holds_nothing_and_comes_back():
    fleet = whole(2)
    history = chain("h", 10)
    fleet.router.events["e0"].receive(0, EventBatch(1.0, (BlockStored(tuple(history), None, (), BLOCK),)))
    request = fleet.send(history)
    assert request.prefill == "e0"
    assert fleet.router.lost("e0") == ("r1",)
    assert fleet.router.load("e0").state is EngineState.DOWN
    assert fleet.route(history).prefill == "e1"
    fleet.router.ready("e0")
    assert {cost.cached_tokens for cost in fleet.route(history).decode_candidates} == {0}
    assert fleet.router.remove_engine("e0") == ()
    fleet.router.add_engine(EngineProfile("e2", prefill=COST))
    assert sorted(fleet.router.events) == ["e1", "e2"]


@pytest.mark.parametrize("block", [256, 1024])  # page 64 or 128, N = 4 or 8
def test_cached_tokens_are_whole_virtual_blocks(block):
    # Field cases C1, C2, F3, F16: a page is not the unit, and short prompts reuse nothing.
    for tokens, shared in [(block - 1, 0), (block, 0), (block + 1, 1), (741, 740 // block), (1500, 1499 // block)]:
        fleet = whole(1, block_tokens=block)
        fleet.router.index.store("e0", Tier.GPU, chain("h", 8))
        cost = fleet.route(chain("h", tokens // block), tokens=tokens).prefill_cost
        assert cost.cached_tokens == shared * block
        assert cost.new_tokens == tokens - cost.cached_tokens >= 1


def test_prompts_that_begin_with_something_volatile_are_counted():
    now = 0.0
    sessions = Sessions(lambda: now, seconds=10, max_sessions=2)
    for first in (1, 1, 2):
        sessions.dispatched("s", ("e0",), [first, 9])
    sessions.dispatched("s", ("e1",), [])
    sessions.dispatched("s", ("e1",), [3])
    assert (sessions.continued, sessions.diverged) == (1, 1)
    assert sessions.engines("s") == ("e1",)
    assert sessions.engines(None) == sessions.engines("t") == ()
    now = 10.0
    assert sessions.engines("s") == ()
    for name in "abc":
        sessions.dispatched(name, (), [])
    assert len(sessions) == 2


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least one engine"):
        whole(0)
    with pytest.raises(ValueError, match="there is an engine 'e0' already"):
        Fleet([EngineProfile("e0", prefill=COST)] * 2)
    with pytest.raises(ValueError, match="goes with no other"):
        Fleet([EngineProfile("e0", prefill=COST), EngineProfile("e1", Role.DECODE)])
    with pytest.raises(ValueError, match="no prefill cost"):
        EngineProfile("e0")
    with pytest.raises(ValueError, match="host_bytes_per_second=0"):
        EngineProfile("e0", prefill=COST, host_bytes_per_second=0)
    with pytest.raises(ValueError, match="delay_weight=-1"):
        RoutePolicy(64, delay_weight=-1)
    fleet = whole(1)
    with pytest.raises(ValueError, match="3 blocks of 64 tokens in a prompt of 191 tokens"):
        fleet.route(chain("h", 3), tokens=191)
    with pytest.raises(ValueError, match="tokens=0"):
        fleet.route([], tokens=0)
    decision = fleet.send(chain("h", 3))
    with pytest.raises(ValueError, match="'r3' is outstanding already"):
        fleet.router.dispatch(decision)
    for call in (fleet.router.drain, fleet.router.ready, fleet.router.lost, fleet.router.remove_engine):
        with pytest.raises(ValueError, match=r"no engine 'x'; there are \['e0'\]"):
            call("x")
