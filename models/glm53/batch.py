"""Prefill and greedy decoding of a batch, step by step: the smallest loop that exercises every kind of step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cptools.cp_kv import TrafficCounters
from cptools.step_plan import StepPlan, make_step_plan

from .block import SelectionObserver

if TYPE_CHECKING:
    from .model import GLM53, EngineCache

Progress = Callable[[StepPlan], None]


@dataclass
class BatchOutput:
    """Results per prompt, the same on all ranks except ``traffic``."""

    ids: list[list[int]]
    """New token ids."""
    prompt_logits: list[Tensor]
    """float32 [T, vocab], or [1, vocab] of the last prompt token."""
    decode_logits: list[Tensor]
    """float32 [decode steps, vocab]: row i belongs to the input ids[i]."""
    traffic: TrafficCounters
    """Of this rank."""


@dataclass
class _Request:
    prompt: list[int]
    handle: int
    computed: int = 0
    ids: list[int] = field(default_factory=list)
    prompt_logits: list[Tensor] = field(default_factory=list)
    decode_logits: list[Tensor] = field(default_factory=list)
    done: bool = False


def run_batch(
    model: GLM53,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    prompt_logits: Literal["last", "all"] = "last",
    stop_at_eos: bool = False,
    observer: SelectionObserver | None = None,
    progress: Progress | None = None,
    cache: EngineCache | None = None,
) -> BatchOutput:
    """See :meth:`GLM53.generate_batch`."""
    pages = [_check_prompt(model, i, prompt, max_new_tokens) for i, prompt in enumerate(prompts)]
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    if cache is None:
        cache = model.new_cache(sum(pages))
    elif cache.tables.allocator.num_free < sum(pages):
        raise ValueError(f"the cache has {cache.tables.allocator.num_free} free pages, the batch needs {sum(pages)}")
    requests = [_Request(prompt, cache.tables.open()) for prompt in prompts]
    try:
        for request in requests:
            cache.tables.reserve(request.handle, _cached_tokens(request.prompt, max_new_tokens))
        while any(not request.done for request in requests):
            step = _Step(model, cache, requests, chunk)
            hidden = model.forward(step.token_ids, step.kv, observer=observer)
            if prompt_logits == "all":
                step.keep_prompt_logits(hidden)
            step.sample(hidden, max_new_tokens, stop_at_eos, keep_last=prompt_logits == "last")
            if progress is not None:
                progress(step.plan)
    finally:
        for request in requests:
            cache.tables.close(request.handle)
    empty = torch.empty(0, model.config.vocab_size, device=model.device)
    return BatchOutput(
        ids=[request.ids for request in requests],
        prompt_logits=[torch.cat(request.prompt_logits) for request in requests],
        decode_logits=[torch.cat([empty, *request.decode_logits]) for request in requests],
        traffic=cache.kv.traffic,
    )


def _cached_tokens(prompt: Sequence[int], max_new_tokens: int) -> int:
    return len(prompt) + max_new_tokens - 1  # the last new token is never fed


def _check_prompt(model: GLM53, number: int, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Pages that the prompt needs; ValueError if it can not run."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not prompt:
        raise ValueError(f"prompt {number} is empty")
    config = model.config
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        raise ValueError(
            f"prompt {number} has token ids in [{min(prompt)}, {max(prompt)}], the vocabulary has {config.vocab_size}"
        )
    tokens = _cached_tokens(prompt, max_new_tokens)
    if tokens > config.max_position_embeddings:
        raise ValueError(
            f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} new ones need {tokens} positions, "
            f"max_position_embeddings={config.max_position_embeddings}"
        )
    return model.kv.layout.pages(tokens)


class _Step:
    """The next chunk of every prefilling request and the next token of every decoding one."""

    def __init__(self, model: GLM53, cache: EngineCache, requests: Sequence[_Request], chunk: int | None) -> None:
        self.model = model
        self.prefilling = [r for r in requests if r.computed < len(r.prompt)]
        self.decoding = [r for r in requests if r.computed >= len(r.prompt) and not r.done]
        self.lens = [min(len(r.prompt) - r.computed, chunk or len(r.prompt)) for r in self.prefilling]
        self.plan = make_step_plan(
            model.cp.plan(self.lens, [r.computed for r in self.prefilling]),
            cache.tables.table([r.handle for r in self.prefilling]),
            decode_context_lens=[r.computed for r in self.decoding],
            decode_tables=cache.tables.table([r.handle for r in self.decoding]),
        )
        self.kv = cache.kv.begin(self.plan, dense_up_to=model.dense_up_to)
        packed = [t for r, n in zip(self.prefilling, self.lens, strict=True) for t in r.prompt[r.computed :][:n]]
        self.token_ids = self.local_ids(packed)

    def local_ids(self, packed: list[int]) -> Tensor:
        """This rank's share of packed prompt ids, then the last sampled id of each decoding request."""
        device = self.model.device
        prompt = self.model.cp.shard(torch.tensor(packed, dtype=torch.int64, device=device), self.plan.prompt)
        return torch.cat([prompt, torch.tensor([r.ids[-1] for r in self.decoding], dtype=torch.int64, device=device)])

    def keep_prompt_logits(self, hidden: Tensor) -> None:
        """Logits of all prompt rows. Collective over PCP."""
        local = self.model.logits(hidden[: self.plan.prompt_rows])
        packed = self.model.cp.unshard(local, self.plan.prompt)
        for request, own in zip(self.prefilling, packed.split(self.lens), strict=True):
            request.prompt_logits.append(own)

    def sample(self, hidden: Tensor, max_new_tokens: int, stop_at_eos: bool, keep_last: bool) -> None:
        """Count the step's tokens and choose the next id of every request that awaits one. Collective over PCP."""
        model, prompt_rows = self.model, self.plan.prompt_rows
        for request, length in zip(self.prefilling, self.lens, strict=True):
            request.computed += length
        for request in self.decoding:
            request.computed += 1
        finished = [i for i, r in enumerate(self.prefilling) if r.computed == len(r.prompt)]
        ends = torch.tensor(self.lens, dtype=torch.int64).cumsum(0) - 1
        last = model.cp.unshard_rows(hidden[:prompt_rows], self.plan.prompt, ends[finished])
        logits = model.logits(torch.cat([last, hidden[prompt_rows:]]))
        prompt_logits, decode_logits = logits[: len(finished), None], logits[len(finished) :, None]
        if keep_last:
            for i, row in zip(finished, prompt_logits, strict=True):
                self.prefilling[i].prompt_logits.append(row)
        for request, row in zip(self.decoding, decode_logits, strict=True):
            request.decode_logits.append(row)
        sampled = logits.argmax(1).tolist()
        for request, token in zip([self.prefilling[i] for i in finished] + self.decoding, sampled, strict=True):
            request.ids.append(token)
            eos = stop_at_eos and token in model.config.eos_token_ids
            request.done = eos or len(request.ids) == max_new_tokens


def mtp_logits(model: GLM53, prompt: list[int], next_token: int) -> Tensor:
    """See :meth:`GLM53.mtp_logits`."""
    cache = model.new_cache(_check_prompt(model, 0, [*prompt, next_token], 1))
    request = _Request(prompt, cache.tables.open())
    cache.tables.reserve(request.handle, len(prompt))
    step = _Step(model, cache, [request], None)
    hidden = model.forward(step.token_ids, step.kv)
    drafts = model.mtp_forward(step.local_ids([*prompt[1:], next_token]), hidden, step.kv)
    return model.cp.unshard(model.logits(drafts), step.plan.prompt)
