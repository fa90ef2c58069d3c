"""Conversations with an engine that caches prefixes or does not, in which every page that nobody needs is poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field

from cptools.kernels.sampling import Sampling
from cptools.page_allocator import PageAllocator
from models.glm53 import GLM53
from serving.core import BlockPool, CacheIdentity, PrefixCache, TokenBlocks
from serving.engine import ModelRunner, TokenLogprob
from tests.checkpoints import random_prompts

PAGE = 8
VOCAB = 512
DRAFTS = 3


@dataclass(eq=False)
class _Running:
    prompt: list[int]
    blocks: TokenBlocks
    cached: int
    rounds: list[tuple[list[int], list[TokenLogprob]]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for tokens, _ in self.rounds for token in tokens]


class Engine:
    """A runner and its prefix cache on this rank. ``cached=False``: nothing is ever published, so nothing is found.

    decoded: publish rows that decode steps wrote, too, and not only those of prompts.
    """

    def __init__(
        self, model: GLM53, pages: int, *, cached: bool = True, decoded: bool = True, drafts: int = DRAFTS
    ) -> None:
        self.pool = BlockPool(PageAllocator(pages))
        self.cache = model.new_cache(pages, allocator=self.pool)
        formats = (str(model.mla), str(model.index))
        identity = CacheIdentity("tiny", "0", model.kv.layout, formats, mtp=drafts > 0)
        self.prefixes = PrefixCache(identity, self.pool)
        self.runner = ModelRunner(
            model, self.cache, max_requests=4, max_tokens=400, draft_tokens=drafts, logprobs=1, batch_sizes=[4]
        )
        self.cached, self.decoded, self.drafts = cached, decoded, drafts
        self.poison()

    def poison(self) -> None:
        free = [page for page in range(self.pool.num_pages) if not self.pool.users(page)]
        gone = [page for page in free if not self.pool.is_cached(page)]
        self.cache.kv.mla_rows.pages[:, gone] = 0xFF
        self.cache.kv.index_rows.pages[:, gone] = 0xFF

    def answer(self, prompts: list[list[int]], new_tokens: int, chunk: int) -> list[_Running]:
        """One turn of some conversations, side by side: at least so many new tokens of each, round by round."""
        running: dict[int, _Running] = {}
        for i, prompt in enumerate(prompts):
            admission = self.prefixes.admit(self.prefixes.blocks(prompt))
            sampling = Sampling(0.8, seed=7, request=i) if i % 2 else Sampling()
            request = self.runner.open(sampling, prefix=admission.prefix, own=admission.own)
            running[request] = _Running(prompt, self.prefixes.blocks(prompt), admission.cached_tokens)
        lengths = self.cache.lengths
        while unfinished := {r: s for r, s in running.items() if len(s.ids) < new_tokens}:
            chunks = {r: s.prompt[lengths[r] : lengths[r] + chunk] for r, s in unfinished.items() if not s.rounds}
            stops = {r: lengths[r] + len(ids) for r, ids in chunks.items()}
            rest = {r: running[r].prompt[stop] for r, stop in stops.items() if stop < len(running[r].prompt)}
            ending = [r for r in chunks if r not in rest]
            decodes = [r for r in unfinished if r not in chunks]
            ticket = self.runner.step(prompts=chunks, ending=ending, following=rest, decodes=decodes)
            logprobs = ticket.logprobs()
            for request, tokens in ticket.tokens().items():
                running[request].rounds.append((tokens, logprobs[request]))
                running[request].blocks.extend(tokens)
            for request in self.cached * list(unfinished):
                prompt_tokens = len(running[request].prompt)
                written = lengths[request] if self.decoded else min(lengths[request], prompt_tokens)
                self.prefixes.publish(running[request].blocks, self.cache.tables, request, written)
            self.poison()
        for request in running:
            self.runner.close(request)
        self.poison()
        assert self.pool.num_free == self.pool.num_pages
        return list(running.values())


THREE = ([[0], [1, 2]], [[2], [0, 1]], [[0], [1, 2]])
TWO = ([[0], [2]], [[2, 0]])
"""Which conversations take a turn, side by side or one after the other; turn by turn."""


def converse(
    engine: Engine, *, chunk: int, groups: tuple[list[list[int]], ...] = THREE, new_tokens: int = 8
) -> tuple[list[list], int]:
    """Conversations behind one system prompt: all rounds of all turns, and how many tokens came from the cache."""
    system, *users = random_prompts((45, 30, 1, 19), VOCAB, seed=1)
    further = [*random_prompts((7, 21, 3), VOCAB, seed=2), *random_prompts((1, 9, 33), VOCAB, seed=3)]
    rounds, found = [], 0
    history = [[*system, *user] for user in users]
    for turn, in_turn in enumerate(groups):
        if turn:  # a stranger passes, and takes the room of others
            rounds.append(engine.answer(random_prompts((100,), VOCAB, seed=10 + turn), 1, 100)[0].rounds)
        for group in in_turn:
            answers = engine.answer([history[i] for i in group], new_tokens, chunk)
            for i, running in zip(group, answers, strict=True):
                rounds.append(running.rounds)
                found += running.cached
                history[i] = [*history[i], *running.ids[:new_tokens]] + (further[3 * turn + i] if turn < 2 else [])
    return rounds, found
