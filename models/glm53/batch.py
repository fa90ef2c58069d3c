"""Prefill and decoding of a batch, with or without drafts: the smallest loop over engine steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cptools.cp_kv import TrafficCounters
from cptools.host_copy import to_device
from cptools.integers import require_int
from cptools.kernels.sampling import Sampling, SamplingRows, Verified
from cptools.step_plan import StepPlan

from .block import SelectionObserver
from .speculative import (
    Continuing,
    Drafts,
    check_drafts,
    draft,
    synthetic_acceptance_rate,
    verify,
    verify_synthetic,
)
from .step import EngineCache, StepResult, check_ids, check_requests

if TYPE_CHECKING:
    from .model import GLM53

Progress = Callable[[StepPlan, Sequence[int]], None]
"""Called after each step: its plan, and how many tokens each of its requests, prompts first, got from it and keeps."""


@dataclass(frozen=True)
class Speculation:
    """How a batch is drafted for; see :meth:`GLM53.generate_batch`."""

    draft_tokens: int = 0
    most_likely_drafts: bool = False
    synthetic_acceptance_length: float | None = None


@dataclass
class BatchOutput:
    """Results per prompt, the same on all ranks except ``traffic``."""

    ids: list[list[int]]
    """New token ids."""
    prompt_logits: list[Tensor]
    """float32 [T, vocab], or [1, vocab] of the last prompt token."""
    decode_logits: list[Tensor]
    """float32 [decode steps, vocab]: row i belongs to the input ids[i]. Without rows where they were not asked for."""
    traffic: TrafficCounters
    """Of this rank, for this batch."""
    accepted: list[int]
    """Entry j: how many verifications accepted j drafts, also such as stand behind the last token that is kept; entry 0
    alone without drafts."""
    synthetic: bool
    """Drafts were accepted by a lot and not by the model (``synthetic_acceptance_length``): the ids mean nothing."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verification gave in the mean, the target's own included; NaN without any."""
        rounds = sum(self.accepted)
        return sum((1 + j) * count for j, count in enumerate(self.accepted)) / rounds if rounds else float("nan")


@dataclass(eq=False)
class _Sequence:
    prompt: list[int]
    request: int
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_probs: Tensor | None = None  # [k, vocab]
    prompt_logits: list[Tensor] = field(default_factory=list)
    decode_logits: list[Tensor] = field(default_factory=list)
    done: bool = False


class _Speculator:
    """The drafts of a batch: carried from a step to the next, verified, and made anew."""

    def __init__(self, model: GLM53, speculation: Speculation) -> None:
        self.model, self.k = model, require_int("draft_tokens", speculation.draft_tokens, minimum=0)
        self.most_likely = speculation.most_likely_drafts
        length = speculation.synthetic_acceptance_length
        if self.k:
            check_drafts(model, self.k)
        elif length is not None or self.most_likely:
            raise ValueError(f"{speculation} has no drafts to speak of")
        self.rate = None if length is None else synthetic_acceptance_rate(length, self.k)
        self.accepted = torch.zeros(self.k + 1, dtype=torch.int64, device=model.device)

    def verify(self, logits: Tensor, continuing: Continuing, sequences: Sequence[_Sequence]) -> Verified:
        """Of the continuing sequences: what each got from the step."""
        device, k, vocab = self.model.device, self.k, self.model.config.vocab_size
        sampling = SamplingRows.of([s.sampling for s in sequences], device)
        tokens = to_device(torch.tensor([s.drafts or [0] * k for s in sequences], dtype=torch.int64), device)
        probs = None
        if any(s.draft_probs is not None for s in sequences):
            none = torch.zeros(k, vocab, device=device)
            probs = torch.stack([none if s.draft_probs is None else s.draft_probs for s in sequences])
        drafts = Drafts(tokens.view(len(sequences), k), probs)
        if self.rate is None:
            verified = verify(logits, continuing, drafts, sampling)
        else:
            verified = verify_synthetic(logits, continuing, drafts, sampling, self.rate)
        counted = verified.accepted[len(continuing.prompts) :]
        self.accepted.scatter_add_(0, counted, torch.ones_like(counted))
        return verified

    def draft(
        self,
        result: StepResult,
        continuing: Continuing,
        verified: Verified,
        chunks: dict[_Sequence, list[int]],
        sequences: Sequence[_Sequence],
    ) -> None:
        """New drafts of the continuing sequences, from the step that verified the old ones."""
        if not self.k:
            return
        next_ids: list[int] = []
        for s, ids in chunks.items():
            stop = result.lengths[s.request]
            next_ids += [*ids[1:], s.prompt[stop] if stop < len(s.prompt) else 0]
        sampling = None if self.most_likely else SamplingRows.of([s.sampling for s in sequences], self.model.device)
        drafts = draft(self.model, result, continuing, verified, next_ids, sampling, draft_tokens=self.k)
        for i, (s, tokens) in enumerate(zip(sequences, drafts.tokens.tolist(), strict=True)):
            s.drafts = tokens
            s.draft_probs = None if drafts.probs is None else drafts.probs[i]


def run_batch(
    model: GLM53,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    prompt_logits: Literal["last", "all"] = "last",
    decode_logits: bool = True,
    stop_at_eos: bool = False,
    sampling: Sequence[Sampling] | Sampling | None = None,
    speculation: Speculation | None = None,
    observer: SelectionObserver | None = None,
    progress: Progress | None = None,
    cache: EngineCache | None = None,
) -> BatchOutput:
    """See :meth:`GLM53.generate_batch`."""
    with model.split.lockstep.checks():
        if chunk is not None:
            require_int("chunk", chunk, minimum=1)
        require_int("max_new_tokens", max_new_tokens, minimum=1)
        if prompt_logits not in ("last", "all"):
            raise ValueError(f"prompt_logits={prompt_logits!r} must be 'last' or 'all'")
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling()] * len(prompts)
        if not isinstance(sampling, Sequence) or not all(isinstance(own, Sampling) for own in sampling):
            raise ValueError(f"sampling={sampling!r} must be a Sampling or one for each prompt")
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(sampling)} sampling settings for {len(prompts)} prompts")
        speculator = _Speculator(model, speculation or Speculation())
        # The last new token is never fed, so it needs no position and no page. Drafts behind it do, since all of them
        # are verified: what is drawn must not depend on where the output is cut.
        ids = [check_ids(model.config, f"prompt {i}", prompt, max_new_tokens - 1) for i, prompt in enumerate(prompts)]
        most = model.max_positions
        lengths = [min(len(prompt) + max_new_tokens - 1 + speculator.k, most) for prompt in ids]
        pages = sum(model.kv.layout.pages(length) for length in lengths)
        if cache is None:
            cache = model.new_cache(pages)
        check_requests(model, cache, {})
        if cache.tables.allocator.num_free < pages:
            raise ValueError(f"the cache has {cache.tables.allocator.num_free} free pages, the batch needs {pages}")

    before = replace(cache.kv.traffic)
    sequences = [_Sequence(prompt, cache.open(), own) for prompt, own in zip(ids, sampling, strict=True)]
    try:
        cache.tables.reserve({s.request: length for s, length in zip(sequences, lengths, strict=True)})
        # Replicas that share experts step until none of them has rows, then all stop at once.
        goes_on = model.split.lockstep.world_size > 1
        while (unfinished := [s for s in sequences if not s.done]) or goes_on:
            cached = cache.lengths
            prefilling = [s for s in unfinished if cached[s.request] < len(s.prompt)]
            stops = [len(s.prompt) if chunk is None else cached[s.request] + chunk for s in prefilling]
            chunks = {s: s.prompt[cached[s.request] : stop] for s, stop in zip(prefilling, stops, strict=True)}
            decoding = [s for s in unfinished if s not in chunks]
            inputs = {s: [s.ids[-1], *s.drafts][: most - cached[s.request]] for s in decoding}
            result = model.step(
                cache,
                prompts={s.request: ids for s, ids in chunks.items()},
                decodes={s.request: ids for s, ids in inputs.items()},
                observer=observer,
            )
            goes_on = result.split.goes_on
            if prompt_logits == "all":
                packed = model.prompt_logits(result)
                for s, own_logits in zip(chunks, packed.split([len(ids) for ids in chunks.values()]), strict=True):
                    s.prompt_logits.append(own_logits)
            ending = [i for i, s in enumerate(chunks) if cached[s.request] == len(s.prompt)]
            going_on = [*(prefilling[i] for i in ending), *decoding]
            continuing = Continuing.of(result.plan, ending, speculator.k, model.device)
            logits = model.last_logits(result)
            verified = speculator.verify(logits, continuing, going_on)
            speculator.draft(result, continuing, verified, chunks, going_on)
            gained = dict.fromkeys([*chunks, *decoding], 0)
            rows = zip(going_on, verified.tokens.tolist(), logits[continuing.rows], strict=True)
            for s, tokens, own_rows in rows:
                new = [token for token in tokens if token >= 0][: max_new_tokens - len(s.ids)]
                if s in inputs:
                    cache.truncate(s.request, cached[s.request] - len(inputs[s]) + len(new))
                if stop_at_eos:
                    new = _until_eos(new, model.config.eos_token_ids)
                gained[s] = len(new)
                if s in inputs:
                    s.decode_logits += [own_rows[: len(new)]] * decode_logits
                elif prompt_logits == "last":
                    s.prompt_logits.append(own_rows[:1])
                s.ids += new
                s.done = len(s.ids) == max_new_tokens or (stop_at_eos and new[-1] in model.config.eos_token_ids)
            if progress is not None:
                progress(result.plan, list(gained.values()))
    finally:
        for s in sequences:
            cache.close(s.request)
    empty = torch.empty(0, model.config.vocab_size, device=model.device)
    return BatchOutput(
        ids=[s.ids for s in sequences],
        prompt_logits=[torch.cat(s.prompt_logits) for s in sequences],
        decode_logits=[torch.cat([empty, *s.decode_logits]) for s in sequences],
        traffic=cache.kv.traffic.since(before),
        accepted=speculator.accepted.tolist(),
        synthetic=speculator.rate is not None,
    )


def _until_eos(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """Up to and with the first eos."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + 1]
