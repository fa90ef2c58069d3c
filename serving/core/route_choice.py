"""Prices a request on engines and picks the cheapest: a function of what is known, without memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cptools.integers import require_int

from .engine_load import EngineLoad
from .kv_events import BlockHash
from .prefix_index import PrefixMatch
from .route_cost import EngineCost, EngineProfile


@dataclass(frozen=True)
class RouteRequest:
    """A request as the router sees it.

    tokens: of the prompt. hashes: of its full blocks, a chain; the tail behind them belongs to no block.
    output_tokens: expected. session: requests of one conversation share it.
    """

    request_id: str
    tokens: int
    hashes: Sequence[BlockHash]
    output_tokens: int = 256
    session: str | None = None


@dataclass(frozen=True)
class RoutePolicy:
    """What an operator decides.

    block_tokens: tokens of a hash block: ``page_size * N`` of the engines (`KVLayout`).
    local_prefill_tokens: a decode engine computes fewer uncached tokens than this itself; 0 never.
    delay_weight: seconds of an engine's work count once for the request and this many times more for others that will
        wait behind it. With 0 every request looks after itself: a busy engine's prompts are computed again on the next
        one as soon as that is a moment quicker, and all wait for that work.
    affinity_seconds: bonus of the engines that served the session's last request.
    """

    block_tokens: int
    local_prefill_tokens: int = 0
    delay_weight: float = 1.0
    affinity_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_int("block_tokens", self.block_tokens, minimum=1)
        require_int("local_prefill_tokens", self.local_prefill_tokens, minimum=0)
        for name in ("delay_weight", "affinity_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")


@dataclass(frozen=True)
class EngineView:
    """All that is known of an engine when a request comes. familiar: it served the session's last request."""

    profile: EngineProfile
    load: EngineLoad
    match: PrefixMatch
    familiar: bool = False
    sure: bool = True


@dataclass(frozen=True)
class Decision:
    """Where a request goes. ``prefill == decode`` where one engine does both.

    candidates: the costs that were compared, cheapest first, of engines for decode (or for all of it) and for prefill.
    """

    request: RouteRequest
    prefill: str
    decode: str
    reason: str
    decode_candidates: tuple[EngineCost, ...]
    prefill_candidates: tuple[EngineCost, ...] = ()

    @property
    def remote_prefill(self) -> bool:
        return self.prefill != self.decode

    @property
    def prefill_cost(self) -> EngineCost:
        """Of the engine that computes the prompt."""
        return (self.prefill_candidates or self.decode_candidates)[0]

    def explain(self) -> str:
        """Why, in numbers: one line for the choice, one for each engine that was compared."""
        lines = [f"request {self.request.request_id}: {self.request.tokens} tokens; {self.reason}"]
        for title, costs in (("prefill", self.prefill_candidates), ("decode", self.decode_candidates)):
            lines += [f"  {title} {'->' if i == 0 else '  '} {cost}" for i, cost in enumerate(costs)]
        return "\n".join(lines)


def choose_one(request: RouteRequest, views: Iterable[EngineView], policy: RoutePolicy) -> Decision:
    """One engine for all of it."""
    costs = _ranked(views, lambda view: _cost(request, view, policy, prefill=True, decode=True))
    best = costs[0].engine
    return Decision(request, best, best, f"{best} is cheapest", costs)


def choose_pair(
    request: RouteRequest,
    decoders: Sequence[EngineView],
    prefillers: Sequence[EngineView],
    policy: RoutePolicy,
) -> Decision | None:
    """The decode engine, then the engine that computes what the decode engine lacks of the prompt.

    That is the decode engine itself for fewer than ``policy.local_prefill_tokens``, since moving them costs more than
    it saves, and where there are no prefill engines. None if then no decode engine can compute prompts.
    """

    prompts = _ranked(prefillers, lambda view: _cost(request, view, policy, prefill=True, decode=False))
    able = decoders if prompts else [view for view in decoders if view.profile.prefill is not None]
    if not able:
        return None

    def local(view: EngineView) -> bool:
        new_tokens = request.tokens - _cached(request, view, policy)
        return view.profile.prefill is not None and (not prompts or new_tokens < policy.local_prefill_tokens)

    def decode_cost(view: EngineView) -> EngineCost:
        cost = _cost(request, view, policy, prefill=local(view), decode=True)
        return cost if local(view) else replace(cost, remote_seconds=prompts[0].seconds)

    costs = _ranked(able, decode_cost)
    decode, new = costs[0].engine, costs[0].new_tokens
    if not prompts:
        return Decision(request, decode, decode, f"no prefill engine is ready, {decode} computes {new} tokens", costs)
    if any(local(view) for view in able if view.profile.name == decode):
        reason = f"{decode} computes {new} < {policy.local_prefill_tokens} tokens itself"
        return Decision(request, decode, decode, reason, costs)
    prefill = prompts[0].engine
    reason = f"{prefill} computes {prompts[0].new_tokens} tokens, {decode} lacks {new}"
    return Decision(request, prefill, decode, reason, costs, prompts)


def _cached(request: RouteRequest, view: EngineView, policy: RoutePolicy) -> int:
    """Tokens of the prompt that need not be computed: whole blocks, and never all tokens, because of the logits."""
    return min(view.match.blocks, (request.tokens - 1) // policy.block_tokens) * policy.block_tokens


def _cost(request: RouteRequest, view: EngineView, policy: RoutePolicy, *, prefill: bool, decode: bool) -> EngineCost:
    """prefill: the engine computes what it lacks; else it pulls that. decode: it makes the tokens."""
    profile, load = view.profile, view.load
    cached = _cached(request, view, policy)
    host, new = max(cached - view.match.gpu_blocks * policy.block_tokens, 0), request.tokens - cached
    read = load.context_tokens + request.tokens + request.output_tokens  # by each step, with this request in the batch
    computing = profile.prefill.seconds(new, cached) if prefill and profile.prefill is not None else 0.0
    restoring = host * profile.kv_bytes_per_token / profile.host_bytes_per_second
    return EngineCost(
        profile.name,
        cached,
        host,
        new,
        prefill_seconds=computing,
        restore_seconds=restoring,
        transfer_seconds=0.0 if prefill else new * profile.kv_bytes_per_token / profile.transfer_bytes_per_second,
        decode_seconds=request.output_tokens * read / profile.decode_tokens_per_second if decode else 0.0,
        queue_seconds=load.queue_seconds if prefill else 0.0,
        others_seconds=policy.delay_weight * (computing + restoring),
        affinity_seconds=policy.affinity_seconds if view.familiar else 0.0,
        sure=view.sure,
    )


def _ranked(views: Iterable[EngineView], cost: Callable[[EngineView], EngineCost]) -> tuple[EngineCost, ...]:
    """Cheapest first; equal costs by who was chosen longest ago, then by name."""
    priced = [(cost(view), view.load.last_dispatch) for view in views]
    return tuple(c for c, _ in sorted(priced, key=lambda pair: (pair[0].seconds, pair[1], pair[0].engine)))
