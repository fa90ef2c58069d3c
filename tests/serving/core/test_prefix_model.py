"""Random schedules of a prefix cache against brute force, and broken caches that these must catch."""

from __future__ import annotations

import functools
from collections import Counter
from hashlib import sha256

import pytest

from serving.core import BlockPool, TokenBlocks
from tests.serving.core.prefix_model import Schedule


@pytest.mark.parametrize("mtp", [False, True])
def test_random_schedules_do_what_brute_force_does(mtp: bool) -> None:
    """No page leaked or freed twice, no wrong hit, no hole, the order of eviction, and events that tell all of it."""
    done: Counter[str] = Counter()
    for seed in range(250):
        done += Schedule(seed, mtp=mtp).run(60)
    wanted = ("hits", "restores", "published", "offloaded", "removed", "refused", "exhausted", "forgotten")
    assert all(done[name] > 20 for name in wanted), done


@pytest.mark.long
@pytest.mark.parametrize("mtp", [False, True])
def test_many_random_schedules(mtp: bool) -> None:
    for seed in range(1000, 4000):
        pages = seed % 9 + 3
        Schedule(seed, mtp=mtp, gpu_pages=pages, host_pages=(seed // 9) % 7).run(80)


class _NotLeafFirst(BlockPool):
    def _may_go(self, block):
        return not block.holds and self._blocks.get(block.hash) is block


class _ForgetsUsers(BlockPool):
    def _hold(self, block):
        pass

    def _unhold(self, block):
        self._offer(block)


class _LastComeFirstGone(BlockPool):
    def _offer(self, block):
        super()._offer(block)
        self._oldest = [(-abs(used), serial, b) for used, serial, b in self._oldest]
        block.used = -abs(block.used)


class _KeepsWhatItEvicts(BlockPool):
    def _tell_removed(self, hashes):
        super()._tell_removed(hashes[1:])


class _TakesWithoutPinning(BlockPool):
    def take(self, hashes, extra=0):
        found = self.match(hashes)
        new = self.allocate(extra)
        self._pages.retain(found)
        for page in found:
            if self.users(page) == 1:
                self._hold(self._of_page[page])
        return found, new


class _ReleasesTwice(BlockPool):
    def release(self, pages):
        super().release(pages)
        if again := [page for page in pages if self.users(page)]:
            super().release(again[:1])


BROKEN = [_NotLeafFirst, _ForgetsUsers, _LastComeFirstGone, _KeepsWhatItEvicts, _TakesWithoutPinning, _ReleasesTwice]


@pytest.mark.parametrize("pool", BROKEN)
def test_a_broken_pool_is_caught(pool: type) -> None:
    def run() -> None:
        for seed in range(200):
            Schedule(seed, mtp=False, pool=pool).run(60)

    with pytest.raises((AssertionError, ValueError, KeyError)):
        run()


class _Weak(TokenBlocks):
    """Hashes that leave something out: what came before the block, the salt, or the token behind it."""

    def __init__(self, identity, tokens=(), *, salt="", without="before"):
        self.without = without
        super().__init__(identity, tokens, salt="" if without == "salt" else salt)

    def extend(self, tokens):
        super().extend(tokens)
        hashes = []
        for i in range(len(self.hashes)):
            before = () if self.without == "before" else self.token_ids(0, i)
            behind = b"" if self.without == "behind" else bytes(self._bytes[(i + 1) * 16 : (i + 1) * 16 + 4])
            hashes.append(sha256(self._root + repr((before, self.token_ids(i, i + 1))).encode() + behind).digest())
        self.hashes = hashes


@pytest.mark.parametrize("without", ["before", "salt", "behind"])
def test_a_weak_identity_is_caught(without: str) -> None:
    def run(without: str, seeds: int) -> None:
        for seed in range(seeds):
            schedule = Schedule(seed, mtp=True)
            schedule.prefixes.blocks = functools.partial(_Weak, schedule.identity, without=without)
            schedule.run(60)

    run("nothing", 3)
    with pytest.raises(AssertionError):
        run(without, 60)
