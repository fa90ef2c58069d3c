"""Prefill and greedy decoding of a batch: the smallest loop over engine steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cptools.cp_kv import TrafficCounters
from cptools.integers import require_int
from cptools.step_plan import StepPlan

from .block import SelectionObserver
from .step import EngineCache, check_ids, check_requests

if TYPE_CHECKING:
    from .model import GLM53

Progress = Callable[[StepPlan], None]


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


@dataclass(eq=False)
class _Sequence:
    prompt: list[int]
    request: int
    ids: list[int] = field(default_factory=list)
    prompt_logits: list[Tensor] = field(default_factory=list)
    decode_logits: list[Tensor] = field(default_factory=list)
    done: bool = False


def run_batch(
    model: GLM53,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    prompt_logits: Literal["last", "all"] = "last",
    decode_logits: bool = True,
    stop_at_eos: bool = False,
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
        # The last new token is never fed, so it needs no position and no page.
        ids = [check_ids(model.config, f"prompt {i}", prompt, max_new_tokens - 1) for i, prompt in enumerate(prompts)]
        lengths = [len(prompt) + max_new_tokens - 1 for prompt in ids]
        pages = sum(model.kv.layout.pages(length) for length in lengths)
        if cache is None:
            cache = model.new_cache(pages)
        check_requests(model, cache, {})
        if cache.tables.allocator.num_free < pages:
            raise ValueError(f"the cache has {cache.tables.allocator.num_free} free pages, the batch needs {pages}")

    before = replace(cache.kv.traffic)
    sequences = [_Sequence(prompt, cache.open()) for prompt in ids]
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
            result = model.step(
                cache,
                prompts={s.request: ids for s, ids in chunks.items()},
                decodes={s.request: s.ids[-1:] for s in decoding},
                observer=observer,
            )
            goes_on = result.split.goes_on
            if prompt_logits == "all":
                packed = model.prompt_logits(result)
                for s, own in zip(chunks, packed.split([len(ids) for ids in chunks.values()]), strict=True):
                    s.prompt_logits.append(own)
            logits = model.last_logits(result)
            sampled = logits.argmax(1).tolist()
            for s, row, token in zip([*chunks, *decoding], logits.unsqueeze(1), sampled, strict=True):
                if s not in chunks:
                    s.decode_logits += [row] * decode_logits
                elif cached[s.request] < len(s.prompt):
                    continue
                elif prompt_logits == "last":
                    s.prompt_logits.append(row)
                s.ids.append(token)
                eos = stop_at_eos and token in model.config.eos_token_ids
                s.done = eos or len(s.ids) == max_new_tokens
            if progress is not None:
                progress(result.plan)
    finally:
        for s in sequences:
            cache.close(s.request)
    empty = torch.empty(0, model.config.vocab_size, device=model.device)
    return BatchOutput(
        ids=[s.ids for s in sequences],
        prompt_logits=[torch.cat(s.prompt_logits) for s in sequences],
        decode_logits=[torch.cat([empty, *s.decode_logits]) for s in sequences],
        traffic=cache.kv.traffic.since(before),
    )
