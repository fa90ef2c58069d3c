"""What is done when pages run short, in the order of what it costs.

Clean pages go first and at once, when somebody takes their place (`BlockStore.take_gpu_pages`). What follows here makes
more of them, or room in the host pool: mirror what nobody is writing; give the request that gains most a hot region;
and, only once no copy is under way that could help, give up a kept prefix, preempt, and let a waiting request compute
rows again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from .blocks import Block, BlockOwner
from .copies import CopyPlan
from .roster import Request, Roster
from .states import PageState


def relieve(roster: Roster, needer: Request | None, *, gpu: bool) -> tuple[list[CopyPlan], list[int]]:
    """Take the next step against a shortage: that of ``needer``, or GPU pages below the watermark.

    gpu: whether the needer lacks GPU pages; else it lacks index pages, which only those who do not run can give.

    Returns copies that begin and requests that were preempted. A needer that is not the oldest admitted request waits
    for those before it rather than take from others what is not in host memory.
    """
    store, sizes = roster.store, roster.sizes
    gpu = gpu or store.gpu_room < sizes.watermark
    if needer is None and not gpu:
        return [], []
    copies = _mirror(roster, running=gpu and sizes.spills)
    given = gpu and sizes.spills and _give_hot(roster)
    if needer is None or copies or given or store.copies_under_way:
        return copies, []
    if _discard_kept(roster):
        return [], []
    if roster.admitted and roster.admitted[0] != needer.id:
        return [], []
    for other in map(roster.requests.__getitem__, reversed(roster.admitted)):
        if other is not needer and not other.outstanding:
            roster.leave(other)
            store.counters.preemptions += 1
            return [], [other.id]
    if all(id == needer.id for id in roster.admitted):
        _discard_waiting(roster, needer)
    return [], []


def _mirror(roster: Roster, *, running: bool) -> list[CopyPlan]:
    """A copy of dirty pages: of idle blocks, then of running requests that may live with a hot region."""
    store, sizes = roster.store, roster.sizes
    room = min(store.host.num_free, sizes.copy_pages)
    chosen = list(islice(_mirrorable(roster, running), room))
    return [store.mirror(chosen)] if chosen else []


def _mirrorable(roster: Roster, running: bool) -> Iterator[Block]:
    yield from roster.store.idle_dirty
    seen: set[Block] = set()  # requests may share a dirty block
    if running:
        for request in _by_size(roster):
            if request.copied < request.tail and (request.hot or request.tail > roster.sizes.hot_pages):
                for block in request.blocks[: request.tail]:
                    if block.state is PageState.DIRTY and block not in seen:
                        seen.add(block)
                        yield block


def _give_hot(roster: Roster) -> bool:
    """A hot region for the request whose other pages that frees are the most, if they are more than it takes."""
    store, sizes = roster.store, roster.sizes
    best, most = None, sizes.hot_pages
    for request in _by_size(roster):
        if request.runs and not request.hot and min(request.copied, request.tail) > most:
            freed = sum(block.pins == 1 and block.state.on_host for block in request.blocks[: request.tail])
            if freed > most and freed + store.gpu_room >= sizes.hot_pages:
                best, most = request, freed
    if best is None:
        return False
    roster.give_hot(best)
    return True


def _by_size(roster: Roster) -> list[Request]:
    return sorted(map(roster.requests.__getitem__, roster.admitted), key=lambda request: -len(request.blocks))


def _discard_kept(roster: Roster) -> bool:
    """Give up the last blocks of the prefixes used longest ago until something is free that was not."""
    for handle, prefix in list(roster.kept.items()):
        freed = _discard_last(roster, prefix)
        if not prefix.blocks:
            del roster.kept[handle]
        if freed:
            return True
    return False


def _discard_waiting(roster: Roster, needer: Request) -> bool:
    """Let the youngest waiting request compute its last blocks again, if that frees something; else the one before."""
    for request in map(roster.requests.__getitem__, reversed(roster.waiting)):
        if request is needer or not request.blocks:
            continue
        freed = _discard_last(roster, request)
        roster.cut(request, len(request.blocks))
        if freed:
            return True
    return False


def _discard_last(roster: Roster, owner: BlockOwner) -> bool:
    store = roster.store
    before = store.gpu.num_free, store.index.num_free, store.host.num_free
    while owner.blocks:
        store.counters.discarded += 1
        store.detach_last(owner)
        if (store.gpu.num_free, store.index.num_free, store.host.num_free) != before:
            # One run's worth, since whoever needs one page will soon need more.
            for _ in range(min(roster.sizes.copy_pages - 1, len(owner.blocks))):
                store.counters.discarded += 1
                store.detach_last(owner)
            return True
    return False
