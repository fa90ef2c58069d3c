"""Speculative decoding with the MTP layer: draft k tokens a request, verify them as rows of its next step, accept.

One round of a request whose last token is t, with drafts d1 .. dk::

    step      the target over [t, d1 .. dk], decode rows behind what is cached       GLM53.step(decodes=...)
    verify    a drafts are accepted, and one token b of the target's own follows     `verify`
    truncate  the cache is as long as what was accepted: t, d1 .. da                 EngineCache.truncate
    draft     the MTP layer over the step's rows, each with the token that follows   `draft`
              it; the row of the last accepted token gives the new d1, and its
              output, fed back k - 1 times, the further ones

Rows of rejected tokens stay in the pages behind the length: a row sees positions up to its own only, and the next step
writes these first. Prompts take part with their chunks, which fills the MTP layer's cache; one that ends in a step
verifies nothing and drafts.

``index_share_for_mtp_iteration``: the further draft steps attend to what the MTP layer's indexer selected for the row
of the last accepted token, read the cache and write nothing. Without it they index anew, and write rows of their own
that the next round overwrites.

Verification, acceptance and drafts are tensors of fixed shapes on the device, and nothing here waits for them: the host
may read the tokens of a round while the next one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cptools.cp_kv import ContextParallelKV
from cptools.host_copy import to_device
from cptools.integers import require_int
from cptools.kernels.sampling import (
    ACCEPT,
    DRAFT,
    SamplingRows,
    Verified,
    draw,
    probabilities,
    sample,
    uniforms,
    verify_drafts,
)
from cptools.kernels.selected_slots import selected_slots
from cptools.layer_context import Selection
from cptools.step_plan import StepPlan
from cptools.step_rows import DecodeRows

from .layer_split import StepSplit
from .mtp import mtp_pass, mtp_weights
from .step import StepResult, check_tokens, local_rows

if TYPE_CHECKING:
    from .model import GLM53


@dataclass(frozen=True, eq=False)
class Drafts:
    """k drafts of each of R requests, on the device."""

    tokens: Tensor
    """int64 [R, k]"""
    probs: Tensor | None = None
    """float32 [R, k, vocab]: the distributions that they were drawn from; None if each is just the most likely one."""


@dataclass(frozen=True, eq=False)
class Continuing:
    """The R requests that get tokens from a step: prompts that end in it, then all that decode. On the device."""

    prompts: tuple[int, ...]
    """Places of the ending prompts among the step's."""
    rows: Tensor
    """int64 [R, k + 1]: among the rows of ``last_logits`` that of the last known token, then those of its drafts; with
    fewer than k of them the last row again."""
    counts: Tensor
    """int64 [R]: drafts that the step had of it; 0 for a prompt."""
    positions: Tensor
    """int64 [R]: of the first of its rows, absolute; -1 for a request of padding."""

    @classmethod
    def of(
        cls, plan: StepPlan, prompts: Sequence[int], draft_tokens: int, device: torch.device | str = "cpu"
    ) -> Continuing:
        """Of a step planned on the host, with k = ``draft_tokens``. Local, no sync.

        Raises ValueError if a decoding request has more than k + 1 rows, or for places that no prompt has.
        """
        if max(plan.decode_query_lens, default=0) > draft_tokens + 1 or min(plan.decode_query_lens, default=1) < 1:
            raise ValueError(
                f"decoding requests have {plan.decode_query_lens} rows; draft_tokens={draft_tokens} allows 1 to "
                f"{draft_tokens + 1}"
            )
        lens, contexts = plan.prompt.query_lens, plan.prompt.context_lens
        if any(not 0 <= require_int("place", place) < len(lens) for place in prompts):
            raise ValueError(f"prompts at places {list(prompts)} of a step of {len(lens)} prompts")
        counts = torch.tensor([0 for _ in prompts] + [rows - 1 for rows in plan.decode_query_lens], dtype=torch.int64)
        queries = torch.tensor(plan.decode_query_lens, dtype=torch.int64)
        first = torch.cat([torch.tensor(list(prompts), dtype=torch.int64), len(lens) + queries.cumsum(0) - queries])
        offsets = torch.minimum(torch.arange(draft_tokens + 1), counts.unsqueeze(1))
        positions = [contexts[i] + lens[i] - 1 for i in prompts] + list(plan.decode_context_lens)
        return cls(
            tuple(prompts),
            to_device(first.unsqueeze(1) + offsets, device),
            to_device(counts, device),
            to_device(torch.tensor(positions, dtype=torch.int64), device),
        )


def verify(logits: Tensor, continuing: Continuing, drafts: Drafts, sampling: SamplingRows) -> Verified:
    """Which drafts the target agrees with, and the token that follows them. Local, the same on all ranks; no sync.

    logits: ``last_logits`` of the step, float32. drafts: R rows; those of ending prompts, and what stands behind a
    request's count, do not matter. With k = 0 this samples. Exact: `cptools.kernels.sampling.verify_drafts`.
    """
    rows, counts, first = logits[continuing.rows], continuing.counts, continuing.positions + 1
    return verify_drafts(rows, drafts.tokens, sampling, first, counts=counts, draft_probs=drafts.probs)


def synthetic_acceptance_rate(length: float, draft_tokens: int) -> float:
    """The rate at which each draft must be accepted for ``length`` tokens a round in the mean, the target's included.

    Solves 1 + r + r^2 + ... + r^k = length. Raises ValueError unless 1 <= length <= k + 1.
    """
    if not 1 <= length <= draft_tokens + 1:
        raise ValueError(f"synthetic acceptance length {length} is outside [1, {draft_tokens + 1}]")
    low, high = 0.0, 1.0
    while (rate := (low + high) / 2) not in (low, high):
        low, high = (rate, high) if sum(rate**i for i in range(draft_tokens + 1)) < length else (low, rate)
    return high


def verify_synthetic(
    logits: Tensor, continuing: Continuing, drafts: Drafts, sampling: SamplingRows, rate: float
) -> Verified:
    """As `verify`, but each draft is accepted with probability ``rate``, whatever the target thinks of it.

    For measurements of speed alone: the tokens are not the model's.
    """
    steps = drafts.tokens.shape[1]
    offsets = torch.arange(steps, device=logits.device)
    first, every = continuing.positions + 1, sampling.repeat(steps)
    where = (first.unsqueeze(1) + offsets).flatten()
    numbers = uniforms(every.seed, every.request, where, purpose=ACCEPT, count=1).view(-1, steps)
    accepted = ((numbers < rate) & (offsets < continuing.counts.unsqueeze(1))).long().cumprod(1).sum(1)
    row = continuing.rows.gather(1, accepted.unsqueeze(1)).squeeze(1)
    own = sample(logits[row], sampling, first + accepted)
    tokens = torch.nn.functional.pad(drafts.tokens, (0, 1), value=-1)
    columns, last = torch.arange(steps + 1, device=logits.device), accepted.unsqueeze(1)
    behind = torch.where(columns == last, own.unsqueeze(1), -1)
    return Verified(torch.where(columns < last, tokens, behind), accepted)


def draft(
    model: GLM53,
    result: StepResult,
    continuing: Continuing,
    verified: Verified,
    next_ids: Sequence[int],
    sampling: SamplingRows | None = None,
    *,
    draft_tokens: int,
) -> Drafts:
    """The MTP layer over a step's rows, then k = ``draft_tokens`` drafts of each continuing request.

    To be called for each step of a request, from its first chunk on, before the request goes on. next_ids: for each
    prompt token of the step, packed, the token that follows it; for the last one of an ending prompt any token.
    sampling: of the continuing requests, to draw drafts where tokens are drawn; None drafts the most likely tokens, and
    no distributions need to be kept.

    Collective as one layer of the step, the gather of the ending prompts' last rows (PCP), and k - 1 times one layer of
    R decode rows. No sync, except with ep > 1.

    Raises ValueError, on all ranks of the engine alike and before any work, without an MTP layer, if a request of the
    step has gone on, if numbers do not fit, or for what is no token. Other replicas in lockstep do not learn of it.
    """
    check_drafts(model, draft_tokens)
    result.check_current()
    plan, kv, ending = result.plan, result.kv, len(continuing.prompts)
    ids = check_tokens(model.config, "next_ids", next_ids)
    if len(ids) != plan.prompt.num_tokens:
        raise ValueError(f"{len(ids)} next_ids for {plan.prompt.num_tokens} prompt tokens")
    ends = torch.tensor(plan.prompt.query_lens, dtype=torch.int64).cumsum(0) - 1
    places = torch.tensor(continuing.prompts, dtype=torch.int64)
    ends = ends[places]

    followers = to_device(torch.tensor(ids, dtype=torch.int64), model.device)
    followers[to_device(ends, model.device)] = verified.tokens[:ending, 0]
    request_ids, contexts = kv.decode.request_ids, continuing.positions[ending:]
    # Rows of rejected drafts get any token: nothing sees them.
    accepted_ids = verified.tokens[ending:].clamp(min=0)[request_ids, kv.decode.positions - contexts[request_ids]]
    followers = local_rows(model, plan, torch.cat([followers, accepted_ids]))
    hidden, selected = mtp_pass(model, kv, result.split, result.hidden, followers)

    own, at = plan.prompt_rows, continuing.positions + verified.accepted
    last = continuing.rows[ending:, 0] - len(plan.prompt.query_lens) + own + verified.accepted[ending:]
    of_prompts = model.cp.unshard_rows(selected[:own], plan.prompt, ends)
    # The dense path selects nothing and sees everything.
    columns = torch.arange(selected.shape[1], device=model.device)
    everything = torch.where(columns <= at[:ending].unsqueeze(1), columns, -1)
    dense = to_device(kv.prompt.lens[places] <= model.dense_up_to, model.device)
    of_prompts = torch.where(dense.unsqueeze(1), everything, of_prompts)
    start = DraftStart(
        hidden=torch.cat([model.cp.unshard_rows(hidden[:own], plan.prompt, ends), hidden[last]]),
        selected=torch.cat([of_prompts, selected[last]]),
        positions=at,
        tables=_join(kv.prompt.tables[to_device(places, model.device)], kv.decode.tables),
    )
    split = result.split.decode_pass(len(at))
    return continue_drafts(model, kv.cache, split, start, sampling, draft_tokens=draft_tokens)


def draft_decode(
    model: GLM53,
    cache: ContextParallelKV,
    rows: DecodeRows,
    hidden: Tensor,
    verified: Verified,
    sampling: SamplingRows | None = None,
) -> Drafts:
    """`draft` behind `GLM53.decode_hidden`: R requests of k + 1 decode rows each, their data on the device.

    rows: those of the step, which hold the drafts of all requests, padding among them. hidden: what `decode_hidden`
    gave for them. sampling: as in `draft`. Collective; no sync, except with ep > 1, and capturable like
    `decode_hidden`.

    Raises ValueError unless the model has an MTP layer and each request more than one row, as many as the others.
    """
    each, requests = rows.per_request, rows.tables.shape[0]
    check_drafts(model, each - 1)
    split = model.split.begin_decode(len(rows))
    next_ids = verified.tokens.clamp(min=0).flatten()
    hidden, selected = mtp_pass(model, cache.begin_decode(rows), split, hidden, next_ids)
    first = torch.arange(requests, device=model.device) * each
    last = first + verified.accepted
    start = DraftStart(hidden[last], selected[last], rows.positions[last], rows.tables)
    split = split.decode_pass(requests)
    return continue_drafts(model, cache, split, start, sampling, draft_tokens=each - 1)


@dataclass(frozen=True, eq=False)
class DraftStart:
    """Where the further draft steps of R requests begin: at the rows of their last accepted tokens, on the device."""

    hidden: Tensor
    """[R, hidden] of the MTP layer at these rows."""
    selected: Tensor
    """int64 [R, index_topk]: positions that they attended to, ascending, then -1."""
    positions: Tensor
    """int64 [R], absolute; -1 for padding."""
    tables: Tensor
    """int64 [R, blocks] page ids."""


def continue_drafts(
    model: GLM53,
    cache: ContextParallelKV,
    split: StepSplit,
    start: DraftStart,
    sampling: SamplingRows | None = None,
    *,
    draft_tokens: int,
) -> Drafts:
    """k = ``draft_tokens`` drafts, the first from the given rows and the others by feeding back the MTP layer's output.

    split: of a pass of R decode rows. Collective as k - 1 layers of these; no sync, except with ep > 1, capturable
    where the kernels are. Without IndexShare the rows of draft steps take the positions behind ``start``; where a
    request holds no page for one, its further drafts are made without a context.
    """
    layout, rank = model.kv.layout, model.kv.rank
    requests = torch.arange(len(start.positions), device=model.device)
    no_slots = torch.full_like(start.positions, -1)
    shared = None
    if model.config.index_share_for_mtp_iteration:
        shared = Selection(start.selected, torch.empty_like(start.selected, dtype=torch.int32))
        selected_slots(shared.ids, shared.positions, requests, start.tables, layout=layout, rank=rank)
    room = (start.tables >= 0).sum(1) * layout.virtual_block
    hidden = start.hidden
    chosen = [_choose(model, hidden, sampling, start.positions + 2)]
    for step in range(1, draft_tokens):
        positions, slots = torch.where(start.positions < 0, -1, start.positions + step), no_slots
        if shared is None:
            positions = torch.where(positions < room, positions, -1)
            slots = model.kv.slot_mapping(positions, requests, start.tables)
        rows = DecodeRows(model.kv, positions, requests, start.tables, slots, per_request=1)
        hidden, _ = mtp_pass(model, cache.begin_decode(rows), split, hidden, chosen[-1][0], shared=shared)
        chosen.append(_choose(model, hidden, sampling, start.positions + 2 + step))
    tokens, probs = zip(*chosen, strict=True)
    kept = [p for p in probs if p is not None]
    return Drafts(torch.stack(tokens, dim=1), torch.stack(kept, dim=1) if kept else None)


def check_drafts(model: GLM53, draft_tokens: int) -> None:
    """ValueError unless the model can make so many drafts of a request."""
    mtp_weights(model.weights)
    if require_int("draft_tokens", draft_tokens) < 1:
        raise ValueError(f"draft_tokens={draft_tokens} must be at least 1 to draft")


def _choose(
    model: GLM53, hidden: Tensor, sampling: SamplingRows | None, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A draft of each row, and the distribution that it was drawn from."""
    logits = model.logits(hidden)
    if sampling is None or sampling.greedy:
        return logits.argmax(1), None
    probs = probabilities(logits, sampling)
    return draw(probs, sampling, positions, purpose=DRAFT), probs


def _join(a: Tensor, b: Tensor) -> Tensor:
    """Tables [A, x] and [B, y] -> [A + B, max(x, y)], -1 behind the shorter ones."""
    width = max(a.shape[1], b.shape[1])
    return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in (a, b)])
