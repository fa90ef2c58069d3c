"""Choosing tokens from logits: greedy, drawn, and drawn so that drafts cost nothing in distribution.

A draw is an exponential race: of independent exponentials with rates w, the first to ring is token i with probability
w[i] / sum(w). So weights need no cumulative sum and no norm, and a row's draw is a function of its own weights, seed,
request and position. Ties go to the lower id.

On the CPU rows are computed in tiles of one shape, so that a row's bits do not depend on the batch; elsewhere all at
once. Nothing waits for the host, and shapes follow from shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import ANY, check_count, check_integers, check_one_device, check_tensor
from ..topk_select import topk_select
from .philox import ACCEPT, SAMPLE, uniforms
from .settings import SamplingRows

ROW_TILE = 16

_LONG = (torch.int64,)  # ids by which torch gathers, and counters of random numbers
_FLOAT = (torch.float32,)


class Verified(NamedTuple):
    """What became of the drafts of R requests; k drafts at most."""

    tokens: Tensor
    """int64 [R, k + 1]: the accepted drafts, then one token of the target's own, then -1."""
    accepted: Tensor
    """int64 [R]: how many drafts were accepted, 0 to k; the row of the last accepted token."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the logits as they are, before temperature and truncation."""

    chosen: Tensor
    """float32 [T]: of the given tokens."""
    ids: Tensor
    """int64 [T, n]: the most likely tokens, best first; equal ones by lower id."""
    logprobs: Tensor
    """float32 [T, n]: of these."""


def _by_tile(fn: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """fn of all rows; on the CPU in tiles of `ROW_TILE` rows, the last one padded: equal shapes give equal bits."""
    rows = columns[0].shape[0]
    if columns[0].device.type != "cpu" or rows == 0:
        return fn(*columns)
    results = []
    for start in range(0, rows, ROW_TILE):
        tile = []
        for column in columns:
            padded = column.new_zeros(ROW_TILE, *column.shape[1:])
            padded[: rows - start] = column[start : start + ROW_TILE]
            tile.append(padded)
        results.append(fn(*tile)[: rows - start])
    return torch.cat(results)


def _check(op: str, logits: Tensor, rows: SamplingRows, positions: Tensor | None = None) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] < 1:
        raise ValueError(f"{op}: want float32 [T, vocab], got {logits.dtype} {tuple(logits.shape)}")
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{op}: {logits.shape[0]} rows of logits, {len(rows)} of settings")
    if positions is not None:
        check_tensor(op, "positions", positions, _LONG, logits.shape[:1])
    check_one_device(op, logits=logits, settings=rows.temperature, positions=positions)


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution each row is drawn from: logits float32 [T, vocab] -> float32 [T, vocab]. Local.

    softmax(logits / temperature) over the tokens that top_k and then top_p leave; one-hot where the temperature is 0. A
    logit of -inf has probability 0. A row whose largest logit is infinite or NaN is taken as at temperature 0, so that
    what is drawn from it shows the NaN as `argmax` does.
    """
    _check("probabilities", logits, rows)
    truncate = rows.truncated

    def distribution(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        peak = x.amax(1, keepdim=True)
        greedy = (temperature.unsqueeze(1) == 0) | ~torch.isfinite(peak)
        scaled = (x - peak) / torch.where(greedy, 1.0, temperature.unsqueeze(1))
        if truncate:
            weights = _truncated(x, torch.exp(scaled), top_k.unsqueeze(1), top_p.unsqueeze(1))
        else:
            weights = torch.exp(scaled)
        best = torch.zeros_like(weights).scatter_(1, x.argmax(1, keepdim=True), 1.0)
        return torch.where(greedy, best, weights / weights.sum(1, keepdim=True))

    return _by_tile(distribution, logits, rows.temperature, rows.top_k, rows.top_p)


def _truncated(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights [T, vocab] with zeros where top_k and top_p [T, 1] leave a token out."""
    # Added zero makes -0.0 the equal of 0.0; a stable sort keeps equal tokens in the order of their ids.
    order = torch.sort(logits + 0.0, dim=1, descending=True, stable=True).indices
    kept = weights.gather(1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = torch.where((top_k == 0) | (rank < top_k), kept, 0.0)
    before = kept.cumsum(1) - kept
    within = (before < top_p * kept.sum(1, keepdim=True)) | (top_p >= 1)
    # The first is always kept: a sum may round to nothing before it.
    kept = torch.where(within | (rank == 0), kept, 0.0)
    return torch.zeros_like(weights).scatter_(1, order, kept)


def draw(weights: Tensor, rows: SamplingRows, positions: Tensor, *, purpose: int = SAMPLE) -> Tensor:
    """A token of each row with probability in proportion to weights float32 [T, vocab], >= 0 -> int64 [T]. Local.

    positions int64 [T]: where in its sequence the token will stand. purpose: SAMPLE, or DRAFT for numbers of their own.
    A row of zeros gives 0, and one with a NaN its first NaN.
    """
    _check("draw", weights, rows, positions)

    def race(w: Tensor, u: Tensor) -> Tensor:
        return torch.where(w <= 0, -1.0, w / -torch.log1p(-u)).argmax(1)

    numbers = uniforms(rows.seed, rows.request, positions, purpose=purpose, count=weights.shape[1])
    return _by_tile(race, weights, numbers)


def sample(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """The next token of each row: logits float32 [T, vocab] -> int64 [T]. Local.

    positions int64 [T]: where in its sequence the token will stand.
    """
    _check("sample", logits, rows, positions)
    if rows.greedy:
        return logits.argmax(1)
    return draw(probabilities(logits, rows), rows, positions)


def verify_drafts(
    logits: Tensor,
    drafts: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    *,
    counts: Tensor,
    draft_probs: Tensor | None = None,
) -> Verified:
    """Accept drafts so that the tokens are distributed as without them. Local.

    Exact rejection sampling (Leviathan et al. 2023, Chen et al. 2023): draft d of distribution q is kept with
    probability min(1, p(d) / q(d)); the first that is not is replaced by a draw from max(p - q, 0), and after the last
    one comes a draw from p. With temperature 0 these are the drafts that equal the target's argmax, and then that.

    Args:
        logits: float32 [R, k + 1, vocab] of the target; row j is what follows draft j (row 0: no draft yet).
        drafts: int64 [R, k]; k may be 0. One outside the vocabulary is never accepted.
        positions: int64 [R]: where in its sequence the first draft stands.
        counts: integers [R]: how many of its k drafts a request has, 0 to k; what stands behind them does not matter.
        draft_probs: float32 [R, k, vocab], the distributions that the drafts were drawn from; without them the drafts
            were not drawn, and q is 1 at the draft.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    requests, steps, vocab = _check_drafts(logits, drafts, rows, positions, counts, draft_probs)
    offsets = torch.arange(steps, device=drafts.device)
    given = (offsets < counts.unsqueeze(1)) & (drafts >= 0) & (drafts < vocab)
    drafts = torch.where(given, drafts, 0)
    every = rows.repeat(steps + 1)
    if rows.greedy:
        best = logits.argmax(2)
        accepted = _run_length((best[:, :steps] == drafts) & given)
        own = best.gather(1, accepted.unsqueeze(1)).squeeze(1)
        return _verified(drafts, accepted, own)
    p = probabilities(logits.flatten(0, 1), every).view(requests, steps + 1, vocab)
    claimed = drafts.unsqueeze(2)
    q = torch.zeros_like(p[:, :steps]).scatter_(2, claimed, 1.0) if draft_probs is None else draft_probs
    settings = rows.repeat(steps)
    where = (positions.unsqueeze(1) + offsets).flatten()
    u = uniforms(settings.seed, settings.request, where, purpose=ACCEPT, count=1).view(requests, steps)
    likely = p[:, :steps].gather(2, claimed).squeeze(2)
    accepted = _run_length((u * q.gather(2, claimed).squeeze(2) < likely) & given)

    at = accepted.view(-1, 1, 1).expand(-1, 1, vocab)
    target = p.gather(1, at).squeeze(1)
    # Behind the last draft there is no q: p itself.
    proposals = torch.cat([torch.where(given.unsqueeze(2), q, 0.0), torch.zeros_like(p[:, :1])], dim=1)
    residual = (target - proposals.gather(1, at).squeeze(1)).clamp(min=0.0)
    # Of two distributions that are equal but for rounding nothing may remain.
    residual = torch.where((residual > 0).any(1, keepdim=True), residual, target)
    return _verified(drafts, accepted, draw(residual, rows, positions + accepted))


def _check_drafts(
    logits: Tensor, drafts: Tensor, rows: SamplingRows, positions: Tensor, counts: Tensor, draft_probs: Tensor | None
) -> tuple[int, int, int]:
    if logits.dim() != 3 or logits.dtype != torch.float32 or drafts.dim() != 2:
        raise ValueError(
            f"verify_drafts: want float32 logits [R, k + 1, vocab] and drafts [R, k], got {logits.dtype} "
            f"{tuple(logits.shape)} and {tuple(drafts.shape)}"
        )
    requests, steps = drafts.shape
    want = (requests, steps, logits.shape[2])
    if logits.shape != (requests, steps + 1, logits.shape[2]) or (
        draft_probs is not None and (draft_probs.shape != want or draft_probs.dtype != torch.float32)
    ):
        probs = None if draft_probs is None else (draft_probs.dtype, tuple(draft_probs.shape))
        raise ValueError(
            f"verify_drafts: drafts {tuple(drafts.shape)} do not fit logits {tuple(logits.shape)}, draft_probs {probs}"
        )
    if len(rows) != requests:
        raise ValueError(f"verify_drafts: {requests} requests, {len(rows)} settings")
    op = "verify_drafts"
    check_tensor(op, "drafts", drafts, _LONG, (requests, steps))
    check_tensor(op, "positions", positions, _LONG, (requests,))
    check_integers(op, "counts", counts, (requests,))
    check_one_device(
        op,
        logits=logits,
        drafts=drafts,
        settings=rows.temperature,
        positions=positions,
        counts=counts,
        draft_probs=draft_probs,
    )
    return want


def _run_length(accept: Tensor) -> Tensor:
    """How many leading columns of bool [R, k] are true: int64 [R]."""
    return accept.long().cumprod(1).sum(1)


def _verified(drafts: Tensor, accepted: Tensor, own: Tensor) -> Verified:
    columns = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    last = accepted.unsqueeze(1)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    behind = torch.where(columns == last, own.unsqueeze(1), -1)
    return Verified(torch.where(columns < last, padded, behind), accepted)


def token_logprobs(logits: Tensor, ids: Tensor, n: int) -> TokenLogprobs:
    """Log-probabilities of chosen tokens ids int64 [T] and of the n most likely, from logits float32 [T, vocab]. Local.

    An id outside the vocabulary has NaN. Raises ValueError if shapes, dtypes or devices do not fit or n is outside
    [0, vocab].
    """
    op = "token_logprobs"
    check_tensor(op, "logits", logits, _FLOAT, (ANY, ANY))
    check_tensor(op, "ids", ids, _LONG, logits.shape[:1])
    check_one_device(op, logits=logits, ids=ids)
    check_count(op, "n", n)
    vocab = logits.shape[1]
    if n > vocab or not vocab:
        raise ValueError(f"{op}: n={n} of a vocabulary of {vocab} in logits {list(logits.shape)}")
    norm = _by_tile(lambda x: torch.logsumexp(x, 1), logits)
    known = (ids >= 0) & (ids < vocab)
    chosen = torch.where(known, logits.gather(1, torch.where(known, ids, 0).unsqueeze(1)).squeeze(1) - norm, torch.nan)
    if n == 0:
        return TokenLogprobs(chosen, ids.new_empty(len(ids), 0), logits.new_empty(len(ids), 0))
    best, values = topk_select(logits, n)
    return TokenLogprobs(chosen, best, values - norm.unsqueeze(1))
