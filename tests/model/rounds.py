"""Speculative rounds of a few requests by hand, so that tests say which drafts come and what happens between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cptools.kernels.sampling import Sampling, SamplingRows
from models.glm53 import GLM53, EngineCache
from models.glm53.speculative import Continuing, Drafts, draft, verify

POISON = 0xFF
"""A byte that makes NaN of every float of a row, FP8 included."""


class Rounds:
    """Greedy requests of one model, k drafts each."""

    def __init__(self, model: GLM53, prompts: Sequence[Sequence[int]], k: int, *, chunk: int | None = None) -> None:
        self.model, self.k, self.prompts = model, k, [list(prompt) for prompt in prompts]
        self.cache: EngineCache = model.new_cache(4 * sum(model.kv.layout.pages(len(p) + 64) for p in prompts))
        self.requests = [self.cache.open() for _ in prompts]
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.drafts: list[list[int]] = [[] for _ in prompts]
        self.accepted: list[int] = []
        """Of the last round."""
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        """Row i of a request gave ids[i]."""
        step = chunk or max(map(len, self.prompts))
        for start in range(0, max(map(len, self.prompts)), step):
            parts = {i: p[start : start + step] for i, p in enumerate(self.prompts) if start < len(p)}
            following = [p[start + 1 : start + 1 + len(parts[i])] for i, p in enumerate(self.prompts) if i in parts]
            ending = [i for i in parts if start + step >= len(self.prompts[i])]
            self._step(prompts=parts, following=following, ending=ending)

    def round(self, drafts: Sequence[Sequence[int]] | None = None) -> None:
        """Verify the given drafts instead of the model's, and draft anew."""
        self._step(decodes={i: [ids[-1], *(drafts or self.drafts)[i]] for i, ids in enumerate(self.ids)})

    def _step(
        self,
        prompts: dict[int, list[int]] | None = None,
        following: Sequence[list[int]] = (),
        ending: Sequence[int] = (),
        decodes: dict[int, list[int]] | None = None,
    ) -> None:
        prompts, decodes = prompts or {}, decodes or {}
        model, cache, who = self.model, self.cache, self.requests
        result = model.step(
            cache,
            prompts={who[i]: ids for i, ids in prompts.items()},
            decodes={who[i]: ids for i, ids in decodes.items()},
        )
        places = [list(prompts).index(i) for i in ending]
        continuing = Continuing.of(result.plan, places, self.k)
        going_on = [*ending, *decodes]
        claimed = [[*decodes.get(i, [0])[1:], *[0] * self.k][: self.k] for i in going_on]
        sampling = SamplingRows.of([Sampling()] * len(going_on))
        logits = model.last_logits(result)
        drafts = Drafts(torch.tensor(claimed, dtype=torch.int64).view(len(going_on), self.k))
        verified = verify(logits, continuing, drafts, sampling)
        # What follows the last token of an ending prompt is not known here.
        next_ids = [t for i, ids in zip(prompts, following, strict=True) for t in (ids + [0])[: len(prompts[i])]]
        if self.k:
            made = draft(model, result, continuing, verified, next_ids, sampling, draft_tokens=self.k).tokens.tolist()
        self.accepted = verified.accepted[len(ending) :].tolist()
        for row, i in enumerate(going_on):
            new = [token for token in verified.tokens[row].tolist() if token >= 0]
            self.ids[i] += new
            self.logits[i] += list(logits[continuing.rows[row]][: len(new)])
            self.drafts[i] = made[row] if self.k else []
            if i in decodes:
                cache.truncate(who[i], cache.lengths[who[i]] - len(decodes[i]) + len(new))

    def known(self, i: int) -> list[int]:
        """All tokens of a request; the cache holds all but the last."""
        return self.prompts[i] + self.ids[i]

    def poison(self) -> None:
        """NaN in every row that no request may read: behind their lengths, and in pages that nobody holds."""
        cache = self.cache
        layout = cache.kv.kv.layout
        for pages in (cache.kv.mla_rows, cache.kv.index_rows):
            kept = [(request, self._slots(request)) for request in self.requests]
            rows = [[pages.gather(layer, slots) for layer in range(pages.pages.shape[0])] for _, slots in kept]
            pages.pages.fill_(POISON)
            for (_, slots), layers in zip(kept, rows, strict=True):
                for layer, own in enumerate(layers):
                    pages.store(layer, slots, own)
        assert layout.world_size == 1

    def _slots(self, request: int) -> Tensor:
        length = self.cache.lengths[request]
        table = self.cache.tables.table([request])
        return self.model.kv.slot_mapping(torch.arange(length), torch.zeros(length, dtype=torch.int64), table)

    def swap(self) -> None:
        """Move every request: its rows are taken out, its pages given back, and the rows put where it lands."""
        cache = self.cache
        taken = []
        for request in self.requests:
            slots = self._slots(request)
            rows = [
                [pages.gather(layer, slots) for layer in range(pages.pages.shape[0])]
                for pages in (cache.kv.mla_rows, cache.kv.index_rows)
            ]
            taken.append((cache.lengths[request], rows))
        before = [cache.tables.table([request]).flatten().tolist() for request in self.requests]
        for request in self.requests:
            cache.close(request)
        # Another takes the first free page, so that nobody comes back to where they were.
        cache.tables.reserve({cache.open(): 1})
        self.requests = [cache.open() for _ in self.requests]
        for request, (length, rows) in zip(self.requests, taken, strict=True):
            cache.tables.reserve({request: length})
            cache.lengths[request] = length
            slots = self._slots(request)
            for pages, layers in zip((cache.kv.mla_rows, cache.kv.index_rows), rows, strict=True):
                for layer, own in enumerate(layers):
                    pages.store(layer, slots, own)
        assert all(
            cache.tables.table([request]).flatten().tolist() != old
            for request, old in zip(self.requests, before, strict=True)
        )

    def recompute(self) -> None:
        """Preempt every request: close it, and prefill anew what it had cached. Its drafts survive."""
        drafts, ids = self.drafts, self.ids
        for request in self.requests:
            self.cache.close(request)
        self.cache.tables.reserve({self.cache.open(): 1})
        self.requests = [self.cache.open() for _ in self.requests]
        everything = [self.known(i) for i in range(len(ids))]
        prompts = {i: known[:-1] for i, known in enumerate(everything)}
        self._step(prompts=prompts, following=[known[1:] for known in everything])
        self.drafts = drafts
