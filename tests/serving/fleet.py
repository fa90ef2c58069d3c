"""Engines that take the time a cost model says and keep an LRU cache of blocks: what a router is tried against."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.core.kv_events import BlockRemoved, BlockStored, EventBatch
from serving.core.route_choice import RoutePolicy, RouteRequest
from serving.core.route_cost import EngineProfile, PrefillCost
from serving.core.router import Router
from tests.serving.agent_traces import BLOCK_TOKENS, TraceRequest


@dataclass
class SimulatedEngine:
    """One prompt after the other; blocks leave the cache least recently used first, of a chain its end first."""

    name: str
    cost: PrefillCost
    capacity: int
    free_at: float = 0.0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    sequence: int = 0

    def serve(self, now: float, request: TraceRequest) -> tuple[float, int, EventBatch]:
        """(time of the first token, tokens computed, what happened to the cache)."""
        hashes = request.hashes
        known = next((i for i, block in enumerate(hashes) if block not in self.held), len(hashes))
        cached = min(known, (request.tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        new = request.tokens - cached
        self.free_at = max(now, self.free_at) + self.cost.seconds(new, cached)
        events: list[BlockStored | BlockRemoved] = []
        if hashes[known:]:
            parent = hashes[known - 1] if known else None
            events.append(BlockStored(hashes[known:], parent, (), BLOCK_TOKENS))
        for block in reversed(hashes):
            self.held[block] = None
            self.held.move_to_end(block)
        gone = [self.held.popitem(last=False)[0] for _ in range(len(self.held) - self.capacity)]
        if gone:
            events.append(BlockRemoved(tuple(gone)))
        return self.free_at, new, EventBatch(self.free_at, tuple(events))


@dataclass
class Outcome:
    new_tokens: int = 0
    waits: list[float] = field(default_factory=list)  # from arrival to first token
    served_by: list[str] = field(default_factory=list)

    @property
    def mean_wait(self) -> float:
        return sum(self.waits) / len(self.waits)


Choose = Callable[[float, TraceRequest, list[SimulatedEngine]], SimulatedEngine]


def round_robin() -> Choose:
    count = iter(range(1 << 30))
    return lambda now, request, engines: engines[next(count) % len(engines)]


def least_loaded(now: float, request: TraceRequest, engines: list[SimulatedEngine]) -> SimulatedEngine:
    return min(engines, key=lambda engine: (max(engine.free_at, now), engine.name))


def replay(requests: list[TraceRequest], choose: Choose, *, cost: PrefillCost, capacity: int, engines: int) -> Outcome:
    fleet = [SimulatedEngine(f"engine{i}", cost, capacity) for i in range(engines)]
    outcome = Outcome()
    for request in requests:
        engine = choose(request.time, request, fleet)
        first, new, _ = engine.serve(request.time, request)
        outcome.new_tokens += new
        outcome.waits.append(first - request.time)
        outcome.served_by.append(engine.name)
    return outcome


def replay_routed(
    requests: list[TraceRequest], *, cost: PrefillCost, capacity: int, engines: int, delay_weight: float = 1.0
) -> Outcome:
    """The same through a `Router`, which learns of the caches by events alone, when a prompt is done."""
    fleet = {f"engine{i}": SimulatedEngine(f"engine{i}", cost, capacity) for i in range(engines)}
    now, policy = 0.0, RoutePolicy(BLOCK_TOKENS, delay_weight=delay_weight)
    router = Router([EngineProfile(name, prefill=cost) for name in fleet], lambda: now, policy)
    outcome = Outcome()
    pending: list[tuple[float, int, str, EventBatch]] = []

    def settle(until: float) -> None:
        while pending and pending[0][0] <= until:
            _, number, name, batch = heapq.heappop(pending)
            router.first_token(str(number))
            router.finish(str(number))
            router.events[name].receive(fleet[name].sequence, batch)
            fleet[name].sequence += 1

    for number, request in enumerate(requests):
        now = request.time
        settle(now)
        decision = router.route(
            RouteRequest(str(number), request.tokens, request.hashes, request.output_tokens, request.session)
        )
        router.dispatch(decision)
        first, new, batch = fleet[decision.prefill].serve(now, request)
        heapq.heappush(pending, (first, number, decision.prefill, batch))
        outcome.new_tokens += new
        outcome.waits.append(first - now)
        outcome.served_by.append(decision.prefill)
    settle(float("inf"))
    assert not router.outstanding
    for name, engine in fleet.items():  # the index knows exactly what the caches hold
        probe = {block: None for request in requests for block in request.hashes}
        assert sum(block in engine.held for block in probe) == len(engine.held)
        for request in requests[:: max(1, len(requests) // 50)]:
            known = next((i for i, b in enumerate(request.hashes) if b not in engine.held), len(request.hashes))
            assert router.index.lookup(request.hashes)[name].blocks == known
    return outcome
