"""Start a request with what is cached of its prompt: pages on the GPU as they are, pages in host memory to restore."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cptools.block_tables import BlockTables
from cptools.integers import require_int

from .block_hashes import CacheIdentity, TokenBlocks, Tokens
from .block_pool import BlockPool


@dataclass(frozen=True)
class Restore:
    """A page to copy, on every rank its own shard: all layers' rows, before the layer that reads them runs."""

    host_page: int
    gpu_page: int


@dataclass(frozen=True)
class Admission:
    """Pages that a request begins with. It is a user of each of them, and of the host pages until it is restored."""

    cached_tokens: int
    """The first tokens of the prompt, which need not be computed: whole virtual blocks, never all tokens."""
    prefix: tuple[int, ...]
    """GPU pages of the cached tokens, in order; the last ``len(restores)`` of them wait for their copies. The shared
    ones are other requests' too: read-only."""
    own: tuple[int, ...]
    """GPU pages for what follows."""
    restores: tuple[Restore, ...] = ()


@dataclass
class PrefixStats:
    """Counters of all admissions; a refused one does not count."""

    requests: int = 0
    prompt_tokens: int = 0
    gpu_hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Found in host memory behind what the GPU had."""
    cold_requests: int = 0
    """Had a full block and found not even the first. Many of them: something volatile stands at the start."""


class PrefixCache:
    """The prefixes that an engine has cached, in one tier or two. Integers only; see `BlockPool` for the rules.

        blocks = prefixes.blocks(prompt)
        admission = prefixes.admit(blocks)                                 # pins; all or nothing
        request = cache.open(admission.prefix, admission.own)              # takes the pages over
        ...                                                                # compute the rest of the prompt, decode
        blocks.extend(tokens)
        prefixes.publish(blocks, cache.tables, request, written)           # as blocks become full
        cache.close(request)                                               # what was published can still be found

    Args:
        identity: of this engine's rows.
        gpu: pages that requests run in; make the engine's `BlockTables` over the same pool.
        host: the second tier. A copy in it is independent of the first: a block may leave one and stay in the other.
    """

    def __init__(self, identity: CacheIdentity, gpu: BlockPool, host: BlockPool | None = None) -> None:
        if host is not None and host.medium == gpu.medium:
            raise ValueError(f"both tiers are named {gpu.medium!r}")
        self.identity, self.gpu, self.host = identity, gpu, host
        self.stats = PrefixStats()

    def blocks(self, tokens: Tokens = (), *, salt: str = "") -> TokenBlocks:
        """The tokens of a sequence in blocks of this cache."""
        return TokenBlocks(self.identity, tokens, salt=salt)

    def match(self, blocks: TokenBlocks) -> tuple[int, int]:
        """Tokens of a prompt that `admit` would find now: on the GPU, and behind these in host memory. Pins nothing."""
        self._check(blocks)
        hashes = blocks.hashes[: blocks.reusable]
        on_gpu = len(self.gpu.match(hashes))
        on_host = 0 if self.host is None else len(self.host.match(hashes[on_gpu:]))
        return on_gpu * blocks.block, on_host * blocks.block

    def admit(self, blocks: TokenBlocks, *, room: int | None = None) -> Admission:
        """Take the longest cached prefix of a prompt, and pages behind it.

        room: tokens behind the cached ones to take pages for; by default the rest of the prompt.

        Raises PoolExhausted, and ValueError for a prompt without tokens or in blocks of another cache; nothing has
        changed then, the order of eviction included.
        """
        if not len(blocks):
            raise ValueError("a prompt without tokens")
        on_gpu, on_host = self.match(blocks)
        cached = on_gpu + on_host
        room = len(blocks) - cached if room is None else require_int("room", room, minimum=0)
        hashes, block = blocks.hashes[: cached // blocks.block], blocks.block
        pages = self.identity.layout.pages(cached + room)
        shared, new = self.gpu.take(hashes, pages - on_gpu // block)
        sources = [] if self.host is None else self.host.take(hashes[len(shared) :])[0]
        targets, own = new[: len(sources)], new[len(sources) :]
        restores = tuple(Restore(*pair) for pair in zip(sources, targets, strict=True))
        stats = self.stats
        stats.requests += 1
        stats.prompt_tokens += len(blocks)
        stats.gpu_hit_tokens += on_gpu
        stats.host_hit_tokens += on_host
        stats.cold_requests += not cached and blocks.reusable > 0
        return Admission(cached, (*shared, *targets), tuple(own), restores)

    def cancel(self, admission: Admission) -> None:
        """Give everything back, for a request that was admitted and not opened. No copy may be under way."""
        self.gpu.release((*admission.prefix, *admission.own))
        self.restored(admission.restores)

    def restored(self, restores: Iterable[Restore]) -> None:
        """These copies are over, on all ranks: the host pages may go."""
        if self.host is not None:
            self.host.release([restore.host_page for restore in restores])

    def publish(self, blocks: TokenBlocks, tables: BlockTables, request: int, written: int) -> int:
        """The full blocks among a request's first ``written`` tokens can be found from now on; returns the new ones.

        blocks: its tokens as far as known. written: tokens whose rows are computed, by work queued at the latest, and
        final: drafts that are not verified do not count, nor does the last token, which is not fed yet. The request's
        pages up to there become read-only for it too. Raises ValueError for other tables or blocks.
        """
        self._check(blocks)
        if tables.allocator is not self.gpu:
            raise ValueError("the tables take their pages from another pool than the cache")
        count = min(require_int("written", written, minimum=0) // blocks.block, len(blocks.hashes))
        tables.protect(request, count)
        if not count or self.gpu.match(blocks.hashes[count - 1 : count]):
            return 0
        return self.gpu.store(blocks, tables.pages(request, stop=count))

    def clear(self) -> None:
        """Forget everything, in both tiers. Requests keep their pages."""
        self.gpu.clear()
        if self.host is not None:
            self.host.clear()

    def _check(self, blocks: TokenBlocks) -> None:
        if blocks.identity != self.identity:
            raise ValueError(f"blocks of {blocks.identity} do not fit a cache of {self.identity}")
