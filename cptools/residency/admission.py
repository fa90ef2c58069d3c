"""Whether the first request of the queue fits, by what it really needs."""

from __future__ import annotations

from enum import Enum

from .roster import Request, Roster
from .states import PageState


class Fit(Enum):
    """How a request may run."""

    RESIDENT = "all rows on the GPU"
    HOT = "its tail on the GPU, a hot region, the rest where it is"
    NO_GPU_PAGES = "not yet: there are too few pages for rows"
    NO_INDEX_PAGES = "not yet: there are too few pages for index keys"


def fit(roster: Roster, request: Request) -> Fit:
    """How a waiting request can be admitted now.

    Counted are the pages of all its known tokens, those of shared blocks that can be dropped now and could not once it
    runs, what admitted requests were promised and have not taken, and a page of growth for each of these.
    """
    store, sizes = roster.store, roster.sizes
    blocks = sizes.blocks(min(max(request.known, request.tokens + 1), sizes.max_tokens))
    new = blocks - len(request.blocks)
    promised_gpu = promised_index = promised_host = 0
    for other in map(roster.requests.__getitem__, roster.admitted):
        rest = max(0, sizes.blocks(other.known) - len(other.blocks))
        promised_index += rest + 1
        promised_gpu += 1 + (min(rest, sizes.active_blocks) if other.hot else rest)
        promised_host += rest if other.hot else 0
    gpu = store.gpu_room - promised_gpu
    index = store.index_room - promised_index
    if new > index:
        return Fit.NO_INDEX_PAGES
    resident = new + request.absent <= gpu
    hot = sizes.spills and blocks > sizes.hot_pages + sizes.active_blocks and sizes.hot_pages < gpu
    if not (resident or hot):
        return Fit.NO_GPU_PAGES
    no_index = sum(block.index_page < 0 or block in store.idle for block in request.blocks)
    if new + no_index > index:
        return Fit.NO_INDEX_PAGES
    if resident and new + request.absent + sum(block in store.evictable for block in request.blocks) <= gpu:
        return Fit.RESIDENT
    if hot:
        tail = request.blocks[roster.tail(request) :]
        settled = (PageState.DIRTY, PageState.COPYING, PageState.CLEAN, PageState.FETCHING)
        beside = gpu - sizes.hot_pages - sum(block.state not in settled for block in tail)
        if beside >= min(new, sizes.active_blocks) and new <= beside + store.host.num_free - promised_host:
            return Fit.HOT
    return Fit.NO_GPU_PAGES
