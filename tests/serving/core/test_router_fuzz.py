"""`Router` under random requests, events and faults, against accounts and prices kept in the plainest way."""

import random

import pytest

from serving.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from serving.core.route_choice import RoutePolicy, RouteRequest
from serving.core.route_cost import EngineProfile, PrefillCost, Role
from serving.core.router import NoEngine, Router

BLOCK = 4
COST = PrefillCost(per_token=1e-3, per_pair=1e-6)
RATES = {"kv_bytes_per_token": 100, "host_bytes_per_second": 1e5, "transfer_bytes_per_second": 1e6}


class Books:
    """What a router should know, by engine."""

    def __init__(self, names):
        self.state = dict.fromkeys(names, "ready")
        self.held = {name: {"GPU": set(), "CPU": set()} for name in names}
        self.sequence = dict.fromkeys(names, 0)
        self.sent = {}  # request -> (prefill, decode, seconds or None after the first token, tokens)

    def queue(self, name):
        return sum(seconds for prefill, _, seconds, _ in self.sent.values() if prefill == name and seconds)

    def cached(self, name, request):
        gpu = next((i for i, b in enumerate(request.hashes) if b not in self.held[name]["GPU"]), len(request.hashes))
        end = gpu
        while end < len(request.hashes) and request.hashes[end] in self.held[name]["CPU"]:
            end += 1
        end = min(end, (request.tokens - 1) // BLOCK)
        return end * BLOCK, max(end - gpu, 0) * BLOCK

    def prompt_seconds(self, name, request):
        cached, host = self.cached(name, request)
        return COST.seconds(request.tokens - cached, cached) + host * 100 / 1e5

    def price(self, name, request, computes):
        lacks = (request.tokens - self.cached(name, request)[0]) * 100 / 1e6
        restore = self.cached(name, request)[1] * 100 / 1e5
        if not computes:
            return lacks + 2 * restore
        return 2 * self.prompt_seconds(name, request) + self.queue(name)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("seed", range(10))
def test_books_and_prices_hold_whatever_happens(seed, split):
    rng = random.Random(seed)
    prefillers, decoders = (["p0", "p1", "p2"], ["d0", "d1"]) if split else ([], ["e0", "e1", "e2"])
    profiles = [EngineProfile(name, Role.PREFILL, COST, **RATES) for name in prefillers]
    profiles += [EngineProfile(name, Role.DECODE if split else Role.BOTH, COST, **RATES) for name in decoders]
    now = 0.0
    policy = RoutePolicy(BLOCK, local_prefill_tokens=6 if split else 0)
    router = Router(profiles, lambda: now, policy, speculation_seconds=0.0)
    books, names = Books(prefillers + decoders), prefillers + decoders
    refused = 0
    for number in range(300):
        now += 1e3  # nothing is believed without an event
        what = rng.random()
        if what < 0.4:
            trunk = rng.randint(0, 3)
            hashes = tuple((trunk, i) for i in range(rng.randint(0, 12)))
            request = RouteRequest(f"r{number}", len(hashes) * BLOCK + rng.randint(not hashes, 3), hashes, 5)
            ready = {name for name in names if books.state[name] == "ready"}
            can_prefill, can_decode = ready & set(prefillers), ready & set(decoders)
            if not can_decode:
                refused += 1
                with pytest.raises(NoEngine):
                    router.route(request)
                continue
            decision = router.route(request)
            remote = min((books.price(name, request, True) for name in can_prefill), default=None)

            def computes(name, request=request, remote=remote):
                return remote is None or request.tokens - books.cached(name, request)[0] < policy.local_prefill_tokens

            prices = {
                name: books.price(name, request, computes(name)) + (0 if computes(name) else remote)
                for name in can_decode
            }
            assert decision.decode in can_decode
            assert prices[decision.decode] == pytest.approx(min(prices.values()))
            assert decision.decode_candidates[0].seconds == pytest.approx(min(prices.values()))
            assert decision.remote_prefill == (not computes(decision.decode))
            if decision.remote_prefill:
                assert books.price(decision.prefill, request, True) == pytest.approx(remote)
            router.dispatch(decision)
            seconds = books.prompt_seconds(decision.prefill, request)
            books.sent[request.request_id] = (decision.prefill, decision.decode, seconds, request.tokens + 5)
        elif what < 0.65 and books.sent:
            name = rng.choice(sorted(books.sent))
            if rng.random() < 0.4:
                router.first_token(name)
                prefill, decode, _, tokens = books.sent[name]
                books.sent[name] = (prefill, decode, None, tokens)
            else:
                assert router.finish(name, stored=rng.random() < 0.5)
                del books.sent[name]
        elif what < 0.9:
            name, medium = rng.choice(names), rng.choice(["GPU", "CPU"])
            held, trunk = books.held[name][medium], rng.randint(0, 3)
            if rng.random() < 0.7:
                new = tuple((trunk, i) for i in range(rng.randint(1, 12)) if (trunk, i) not in held)
                held.update(new)
                event = BlockStored(new, None, (), BLOCK, medium=medium)
            elif rng.random() < 0.9:
                gone = tuple(rng.sample(sorted(held), min(len(held), 3)))
                held.difference_update(gone)
                event = BlockRemoved(gone, medium)
            else:
                books.held[name] = {"GPU": set(), "CPU": set()}
                event = AllBlocksCleared()
            router.events[name].receive(books.sequence[name], EventBatch(now, (event,)))
            books.sequence[name] += 1
        else:
            name = rng.choice(names)
            state = rng.choice(["ready", "ready", "draining", "down"])
            books.state[name] = state
            if state == "down":
                stranded = {r for r, (prefill, decode, _, _) in books.sent.items() if name in (prefill, decode)}
                assert set(router.lost(name)) == stranded
                for request_id in stranded:
                    del books.sent[request_id]
                    assert not router.finish(request_id)
                books.held[name], books.sequence[name] = {"GPU": set(), "CPU": set()}, 0
            else:
                (router.ready if state == "ready" else router.drain)(name)
        assert set(router.outstanding) == set(books.sent)
        for name in names:
            assert router.load(name).queue_seconds == pytest.approx(books.queue(name))
            contexts = sum(tokens for _, decode, _, tokens in books.sent.values() if decode == name)
            assert router.load(name).context_tokens == contexts
    for request_id in list(books.sent):
        router.finish(request_id)
    assert all(not router.load(name).requests and router.load(name).queue_seconds == 0 for name in names)
    assert refused < 100
