"""Which engine serves a request: the one that has it done soonest, counted in seconds.

The cost of an engine is what it still has to compute of the prompt, what it has to restore from host memory, and what
stands in its queue. So a long cached prefix attracts, a queue repels, and each yields where the seconds say so: no
weights to tune, and no threshold of load beyond which locality is dropped. llm-d's weighted scorers and the cost of
Dynamo's router are the models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from cptools.integers import require_int

from .engine_events import EngineEvents, Translate
from .engine_load import EngineLoad, EngineState
from .kv_events import Clock
from .prefix_index import PrefixIndex
from .route_choice import Decision, EngineView, RoutePolicy, RouteRequest, choose_one, choose_pair
from .route_cost import EngineProfile, Role
from .sessions import Sessions
from .speculation import SpeculativeChains


class NoEngine(RuntimeError):
    """No engine takes the request now.

    retry_after: seconds until the least loaded one may, where they are only full (HTTP 429 and Retry-After); None where
    none is ready (503).
    """

    def __init__(self, message: str, *, retry_after: float | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Router:
    """Chooses engines and keeps account of what it sent to them. No I/O. Not thread-safe.

        decision = router.route(request)          # changes nothing
        router.dispatch(decision)                 # it was sent
        router.first_token(request.request_id)    # the prompt is done
        router.finish(request.request_id)         # ended, failed or cancelled: always, as in a `finally`

    and `router.events[engine]` takes that engine's KV events.

    All engines have the role BOTH, or each has PREFILL or DECODE. In the second case the decode engine is chosen first;
    it computes the rest of the prompt itself where that is short, else the cheapest prefill engine does.

    Equal costs go to the engine that was chosen longest ago, then by name: no chance, so a replay decides alike.

    Args:
        engines: at least one.
        clock: seconds that never go back.
        policy: see `RoutePolicy`.
        max_blocks, speculation_seconds, events_patience: see `PrefixIndex`, `SpeculativeChains`, `EngineEvents`.
    """

    def __init__(
        self,
        engines: Iterable[EngineProfile],
        clock: Clock,
        policy: RoutePolicy,
        *,
        max_blocks: int = 4_000_000,
        speculation_seconds: float = 2.0,
        events_patience: float = 1.0,
    ) -> None:
        self.policy = policy
        self.index = PrefixIndex(max_blocks=max_blocks)
        self.speculation = SpeculativeChains(clock, seconds=speculation_seconds)
        self.sessions = Sessions(clock)
        self._clock, self._patience = clock, events_patience
        self._profiles: dict[str, EngineProfile] = {}
        self._loads: dict[str, EngineLoad] = {}
        self._events: dict[str, EngineEvents] = {}
        self._sent: dict[str, Decision] = {}
        self._dispatches = 0
        for profile in engines:
            self.add_engine(profile)
        if not self._profiles:
            raise ValueError("a router needs at least one engine")

    @property
    def events(self) -> Mapping[str, EngineEvents]:
        return MappingProxyType(self._events)

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Ids of requests that were dispatched and did not finish."""
        return tuple(self._sent)

    def add_engine(self, profile: EngineProfile, *, translate: Translate | None = None) -> None:
        """translate: see `EngineEvents`. Raises ValueError for a name that is there, or a role that fits no other's."""
        if profile.name in self._profiles:
            raise ValueError(f"there is an engine {profile.name!r} already")
        if any((other.role is Role.BOTH) != (profile.role is Role.BOTH) for other in self._profiles.values()):
            raise ValueError(f"engine {profile.name!r} is {profile.role.value}: the role both goes with no other")
        self.index.add_engine(profile.name)
        self._profiles[profile.name], self._loads[profile.name] = profile, EngineLoad()
        self._events[profile.name] = EngineEvents(
            self.index, profile.name, self._clock, patience=self._patience, translate=translate
        )

    def remove_engine(self, engine: str) -> tuple[str, ...]:
        """As `lost`, for good."""
        stranded = self.lost(engine)
        self.index.remove_engine(engine)
        del self._profiles[engine], self._loads[engine], self._events[engine]
        return stranded

    def load(self, engine: str) -> EngineLoad:
        """To be read, for metrics."""
        if engine not in self._loads:
            raise ValueError(f"there is no engine {engine!r}; there are {sorted(self._loads)}")
        return self._loads[engine]

    def drain(self, engine: str) -> None:
        """No more requests for this engine; those it has go on. What it holds stays known."""
        self.load(engine).state = EngineState.DRAINING

    def ready(self, engine: str) -> None:
        """Healthy again, or no longer draining."""
        self.load(engine).state = EngineState.READY

    def lost(self, engine: str) -> tuple[str, ...]:
        """The engine is gone: it holds nothing, and takes nothing until `ready`.

        Returns the ids of the requests that it had. They are finished here, on their other engine too: the caller sends
        them again or answers with an error.
        """
        load = self.load(engine)
        load.state = EngineState.DOWN
        stranded = tuple(name for name, sent in self._sent.items() if engine in (sent.prefill, sent.decode))
        for request_id in stranded:
            self.finish(request_id, stored=False)
        self._events[engine].lost()
        self.speculation.drop_engine(engine)
        return stranded

    def route(self, request: RouteRequest) -> Decision:
        """Choose. Changes no account; what the index meets on the way counts as in use.

        Raises NoEngine if none takes requests, ValueError if the request's blocks hold more than its tokens.
        """
        require_int("tokens", request.tokens, minimum=1)
        require_int("output_tokens", request.output_tokens, minimum=0)
        if len(request.hashes) * self.policy.block_tokens > request.tokens:
            blocks = f"{len(request.hashes)} blocks of {self.policy.block_tokens} tokens"
            raise ValueError(f"{blocks} in a prompt of {request.tokens} tokens")
        for events in self._events.values():
            events.poll()
        views = self._views(request)
        if any(view.profile.role is Role.BOTH for view in views.values()):
            return choose_one(request, self._takers(Role.BOTH, views), self.policy)
        decision = choose_pair(
            request,
            self._takers(Role.DECODE, views),
            self._takers(Role.PREFILL, views, may_lack=True),
            self.policy,
        )
        if decision is None:
            raise NoEngine(f"no prefill engine is ready: {self._states()}", retry_after=None)
        return decision

    def dispatch(self, decision: Decision) -> None:
        """The request was sent as decided. Raises ValueError if its id is outstanding or an engine is not there."""
        request, cost = decision.request, decision.prefill_cost
        if request.request_id in self._sent:
            raise ValueError(f"request {request.request_id!r} is outstanding already")
        prefill, decode = self.load(decision.prefill), self.load(decision.decode)
        self._dispatches += 1
        self._sent[request.request_id] = decision
        work = cost.prefill_seconds + cost.restore_seconds
        prefill.prefills[request.request_id] = work
        decode.contexts[request.request_id] = request.tokens + request.output_tokens
        for engine, load in {decision.prefill: prefill, decision.decode: decode}.items():
            load.last_dispatch = self._dispatches
            self.speculation.add((request.request_id, engine), engine, request.hashes, delay=cost.queue_seconds + work)
        if request.session is not None:
            self.sessions.dispatched(request.session, (decision.prefill, decision.decode), request.hashes)

    def progress(self, request_id: str, remaining_tokens: int) -> None:
        """So many tokens of the prompt are still to compute. Nothing happens for a request that is not outstanding."""
        require_int("remaining_tokens", remaining_tokens, minimum=0)
        if (sent := self._sent.get(request_id)) is not None:
            cost = self._profiles[sent.prefill].prefill
            prefills = self._loads[sent.prefill].prefills
            if cost is not None and request_id in prefills:
                done = max(sent.request.tokens - remaining_tokens, 0)
                prefills[request_id] = cost.seconds(remaining_tokens, done)

    def first_token(self, request_id: str) -> None:
        """The prompt is computed. Nothing happens for a request that is not outstanding."""
        if (sent := self._sent.get(request_id)) is not None:
            self._loads[sent.prefill].prefills.pop(request_id, None)

    def finish(self, request_id: str, *, stored: bool = True) -> bool:
        """The request is over, whatever the way: its work is off the books.

        stored: False where its blocks will not come, since it was refused or cancelled early. Returns whether it was
        outstanding, so calling twice, or after its engine was lost, is no mistake.
        """
        if (sent := self._sent.pop(request_id, None)) is None:
            return False
        for engine in {sent.prefill, sent.decode}:
            self._loads[engine].finish(request_id)
            if not stored:
                self.speculation.drop((request_id, engine))
        return True

    def _views(self, request: RouteRequest) -> dict[str, EngineView]:
        matches = self.index.lookup(request.hashes, self.speculation.covered(request.hashes))
        before = self.sessions.engines(request.session)
        return {
            name: EngineView(
                profile,
                self._loads[name],
                matches[name],
                name in before,
                self._events[name].sure,
            )
            for name, profile in self._profiles.items()
        }

    def _takers(self, role: Role, views: Mapping[str, EngineView], *, may_lack: bool = False) -> list[EngineView]:
        """Engines of a role that take a request. may_lack: none of them being ready is no error."""
        ready = [v for v in views.values() if v.profile.role is role and v.load.state is EngineState.READY]
        free = [view for view in ready if len(view.load.requests) < view.profile.max_requests]
        if free or (may_lack and not ready):
            return free
        if not ready:
            raise NoEngine(f"no engine for {role.value} is ready: {self._states()}", retry_after=None)
        wait = min(view.load.queue_seconds for view in ready)
        raise NoEngine(f"all {len(ready)} engines for {role.value} are full", retry_after=wait)

    def _states(self) -> str:
        return ", ".join(f"{name} {load.state.value}" for name, load in sorted(self._loads.items()))
