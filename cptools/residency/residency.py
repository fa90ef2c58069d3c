"""Which rows of which request are on the GPU and which in host memory: the object an engine asks before each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from cptools.integers import require_int

from .admission import Fit, fit
from .blocks import Block
from .copies import CopyDone, CopyPlan
from .plan import Admitted, Counters, Places, ResidencyPlan, TableUpdate
from .pressure import relieve
from .roster import Phase, Request, Roster
from .sizes import ResidencySizes
from .states import PageState


class _Missing(Enum):
    """Why a request can not go on in this pass."""

    GPU_PAGES = "pages for rows"
    INDEX_PAGES = "pages for index keys"
    TURN = "an older request needs pages too"


class Residency:
    """Residency of all requests of one engine. Integers only; local, no communication; not thread-safe.

    One object decides for all ranks of a KV group, or each rank keeps one and all of them make the same calls: the same
    calls give the same plans. Every method that raises ValueError has changed nothing.

        residency = Residency(sizes)
        request = residency.add(len(prompt))
        while ...:
            plan = residency.schedule({request: chunk})      # before each step
            ...                                              # workers: tables, hot regions, copies, then the step
            residency.commit(request, chunk)                 # its rows are there
            residency.completed(CopyDone(copy, rank))        # whenever a rank reports, in any order
        residency.finish(request)
    """

    def __init__(self, sizes: ResidencySizes) -> None:
        self.sizes = sizes
        self._roster = Roster(sizes)
        self._store = self._roster.store

    def add(self, known_tokens: int, *, shares: int | None = None, blocks: int = 0) -> int:
        """A new request at the end of the queue; its id is larger than all before it.

        Args:
            known_tokens: rows that it needs for certain: its prompt.
            shares: a request, or the handle of a kept prefix, that has the same tokens in its first ``blocks`` blocks;
                where drafts are made of these rows, the token behind them too, since the MTP layer's row of a token
                depends on the next one. Shared blocks are never written.

        Raises:
            ValueError: no such source, it does not have so many complete blocks, or nothing would be left to compute.
        """
        known = require_int("known_tokens", known_tokens, minimum=1)
        blocks = require_int("blocks", blocks, minimum=0)
        if known > self.sizes.max_tokens:
            raise ValueError(f"known_tokens={known} exceeds max_tokens={self.sizes.max_tokens}")
        there = 0 if shares is None else self.shareable(shares)
        if blocks > there:
            raise ValueError(f"blocks={blocks}, but {shares} has {there} complete ones")
        if blocks * self.sizes.layout.virtual_block >= known:
            raise ValueError(f"blocks={blocks} leave nothing to compute of known_tokens={known}")
        if shares is None or not blocks:
            return self._roster.enter(known, []).id
        return self._roster.enter(known, self._roster.source(shares).blocks[:blocks]).id

    def shareable(self, source: int) -> int:
        """Blocks that another request may share of a request or of a kept prefix; 0 for a prefix that was given up."""
        if source in self._roster.kept:
            return len(self._roster.kept[source].blocks)
        request = self._roster.requests.get(source)
        there = request.tokens // self.sizes.layout.virtual_block if request else 0
        return min(there, self._roster.damaged.get(source, there))

    def schedule(self, rows: Mapping[int, int]) -> ResidencyPlan:
        """One pass, before a step: who may write, who leaves the queue, what moves.

        Older requests come first: once one can not get the pages that it needs, no younger one takes any in this pass
        and nobody is admitted.

        Args:
            rows: of running requests, the rows that the next step writes behind all those asked for and not committed.

        Raises:
            ValueError: a request that does not run, or more rows than ``max_step_tokens`` or ``max_tokens`` allow.
        """
        for id, count in rows.items():
            self._check_rows(id, count)
        self._roster.send_back_damaged()
        granted: list[int] = []
        late: list[int] = []
        admitted: list[Admitted] = []
        copies: list[CopyPlan] = []
        preempted: list[int] = []
        needer: Request | None = None
        gpu_short = False
        for id in self._roster.admitted:
            request = self._roster.requests[id]
            if request.phase is Phase.LOADING:
                missing = self._load(request, copies, first=needer is None)
                if missing is not None and needer is None:
                    needer, gpu_short = request, missing is _Missing.GPU_PAGES
                elif request.runs:
                    admitted.append(Admitted(id, request.tokens))
            elif id in rows:
                if id in self._roster.damaged:
                    late.append(id)
                    continue
                missing = self._grow(request, rows[id], first=needer is None)
                (granted if missing is None else late).append(id)
                if missing is not None and needer is None:
                    needer, gpu_short = request, missing is _Missing.GPU_PAGES
        while needer is None and self._roster.waiting:
            request = self._roster.requests[self._roster.waiting[0]]
            how = fit(self._roster, request)
            if how not in (Fit.RESIDENT, Fit.HOT):
                needer, gpu_short = request, how is Fit.NO_GPU_PAGES
                break
            self._roster.admit(request, hot=how is Fit.HOT)
            missing = self._load(request, copies, first=True)
            if missing is not None:
                needer, gpu_short = request, missing is _Missing.GPU_PAGES
            elif request.runs:
                admitted.append(Admitted(request.id, request.tokens))
        more, preempted = relieve(self._roster, needer, gpu=gpu_short)
        copies += more
        if needer is None and not more:
            copies += self._readopt()
        gone = set(preempted)
        preempted = [*(id for id in self._roster.preempted if id in self._roster.requests), *preempted]
        self._roster.preempted.clear()
        hot = tuple(self._roster.hot_changes.values())
        self._roster.hot_changes.clear()
        return ResidencyPlan(
            granted=tuple(id for id in granted if id not in gone),
            waiting=tuple(id for id in late if id not in gone),
            admitted=tuple(each for each in admitted if each.request not in gone),
            preempted=tuple(preempted),
            updates=self._updates(),
            hot=hot,
            copies=tuple(copies),
        )

    def commit(self, request: int, rows: int, accepted: int | None = None) -> None:
        """Of rows that were granted, the first ``accepted`` (all unless said) are there for good: draft rows may be
        fewer. In the order of the grants.

        Raises:
            ValueError: more rows than are outstanding, or accepted outside [0, rows].
        """
        accepted = rows if accepted is None else accepted
        held = self._running(request)
        if not 0 <= rows <= held.outstanding or not 0 <= accepted <= rows:
            raise ValueError(f"request {request}: rows={rows} of {held.outstanding} outstanding, accepted={accepted}")
        held.outstanding -= rows
        held.tokens += accepted
        self._roster.move_tail(held)

    def completed(self, done: CopyDone) -> None:
        """A rank has done its share of a copy, whatever became of the requests meanwhile.

        Raises:
            ValueError: no such copy is under way, the rank has reported it, or damaged pages are not those it fetches.
        """
        for block in self._store.report(done):
            if block.owners:
                self._roster.lose(block)

    def preempt(self, request: int) -> None:
        """Put a running request back in the queue, where its arrival puts it. Its rows stay unless memory runs out.

        Raises:
            ValueError: it does not run, or rows are outstanding.
        """
        held = self._running(request)
        if held.outstanding:
            raise ValueError(f"request {request} has {held.outstanding} outstanding rows")
        self._roster.leave(held)
        self._store.counters.preemptions += 1

    def finish(self, request: int, *, keep_blocks: int = 0) -> int | None:
        """A request is over, at any time; its steps and copies may still be under way.

        Args:
            keep_blocks: first blocks that are kept for others to share until memory runs short.

        Returns:
            The handle of the kept prefix, or None.

        Raises:
            ValueError: no such request, or it does not have so many complete blocks.
        """
        held = self._held(request)
        if require_int("keep_blocks", keep_blocks, minimum=0) > self.shareable(request):
            raise ValueError(
                f"keep_blocks={keep_blocks}, request {request} has {self.shareable(request)} complete ones"
            )
        handle = self._roster.keep(held, keep_blocks) if keep_blocks else None
        self._roster.remove(held)
        self._roster.hot_changes.pop(request, None)
        return handle

    def abort(self, request: int) -> None:
        """`finish` without keeping anything."""
        self.finish(request)

    def forget(self, handle: int) -> None:
        """Give up a kept prefix. Raises ValueError if there is none, also where memory took it."""
        if handle not in self._roster.kept:
            raise ValueError(f"no prefix {handle} is kept")
        self._roster.forget(handle)

    def places(self, request: int) -> Places:
        """Where each block of a request can be read now."""
        held = self._held(request)
        columns = [block.places() for block in held.blocks]
        gpu, index, host = zip(*columns, strict=True) if columns else ((), (), ())
        return Places(gpu, index, host, held.hot)

    def tokens(self, request: int) -> int:
        """Rows of a request that are there for good."""
        return self._held(request).tokens

    @property
    def queue(self) -> tuple[int, ...]:
        """Requests that wait to be admitted, in order of arrival."""
        return tuple(self._roster.waiting)

    @property
    def running(self) -> tuple[int, ...]:
        """Requests that may ask for rows, in order of arrival."""
        requests = self._roster.requests
        return tuple(id for id in self._roster.admitted if requests[id].runs)

    @property
    def counters(self) -> Counters:
        """Totals so far, a copy."""
        return replace(self._store.counters)

    @property
    def roster(self) -> Roster:
        """What all this stands on, to be looked at."""
        return self._roster

    def _missing(self, gpu_pages: int, index_pages: int, *, first: bool) -> _Missing | None:
        """What is missing to take so many pages; a request that is not the first to need some takes none."""
        if gpu_pages <= 0 and index_pages <= 0:
            return None
        if gpu_pages > self._store.gpu_room:
            return _Missing.GPU_PAGES
        if index_pages > self._store.index_room:
            return _Missing.INDEX_PAGES
        return None if first else _Missing.TURN

    def _grow(self, request: Request, rows: int, *, first: bool) -> _Missing | None:
        """Make the next rows writable, unless something is missing."""
        store, sizes = self._store, self.sizes
        end = request.tokens + request.outstanding + rows
        have = len(request.blocks)
        new = sizes.blocks(end) - have
        missing = self._missing(new, new, first=first)
        if missing is not None:
            return missing
        if new > 0:
            self._roster.extend(request, store.new_blocks(range(have, have + new)))
        if rows:
            for block in request.blocks[request.tokens // sizes.layout.virtual_block :]:
                store.rewrite(block)
        request.outstanding += rows
        return None

    def _load(self, request: Request, copies: list[CopyPlan], *, first: bool) -> _Missing | None:
        """Bring to the GPU what an admitted request must find there, unless something is missing."""
        store = self._store
        needed = request.blocks[request.tail if request.hot else 0 :]
        rows = [block for block in needed if block.state is PageState.HOST]
        index = [block for block in request.blocks if block.index_page < 0]
        missing = self._missing(len(rows), len(index), first=first)
        if missing is not None:
            return missing
        most = self.sizes.copy_pages
        for start in range(0, max(len(rows), len(index)), most):
            copies.append(store.fetch(rows[start : start + most], index[start : start + most]))
        if self._loaded(request, needed):
            request.phase = Phase.RUNNING
        return None

    def _loaded(self, request: Request, needed: list[Block]) -> bool:
        """Whether all that a request must find on the GPU is there, and no copy reads what its steps will write."""
        written = request.blocks[request.tokens // self.sizes.layout.virtual_block :]
        return (
            all(block.state.on_gpu for block in needed)
            and not any(block.state is PageState.COPYING for block in written)
            and not any(block.index_under_way for block in request.blocks)
        )

    def _readopt(self) -> list[CopyPlan]:
        """With room to spare, bring back rows of the oldest request with a hot region; without any left to bring back,
        take its region back."""
        store, sizes = self._store, self.sizes
        for request in map(self._roster.requests.__getitem__, self._roster.admitted):
            if not request.hot or not request.runs:
                continue
            rest = max(0, sizes.blocks(request.known) - len(request.blocks))
            if store.gpu.num_free < request.absent + rest + 2 * sizes.watermark + sizes.active_blocks:
                break
            if not request.absent:
                self._roster.take_back_hot(request)
                continue
            rows = [block for block in request.blocks if block.state is PageState.HOST][: sizes.copy_pages]
            return [store.fetch(rows, [])] if rows else []
        return []

    def _updates(self) -> tuple[TableUpdate, ...]:
        updates = [
            TableUpdate(owner.id, block.number, *block.places())
            for block in self._store.touched
            for owner in block.owners
            if isinstance(owner, Request) and owner.runs
        ]
        self._store.touched.clear()
        return tuple(updates)

    def _check_rows(self, id: int, count: int) -> None:
        request = self._running(id)
        outstanding = request.outstanding + require_int(f"rows of request {id}", count, minimum=0)
        if outstanding > self.sizes.max_step_tokens or request.tokens + outstanding > self.sizes.max_tokens:
            raise ValueError(
                f"request {id}: {count} rows more make {outstanding} outstanding behind {request.tokens}; "
                f"max_step_tokens={self.sizes.max_step_tokens}, max_tokens={self.sizes.max_tokens}"
            )

    def _held(self, id: int) -> Request:
        if id not in self._roster.requests:
            raise ValueError(f"request {id} is not there")
        return self._roster.requests[id]

    def _running(self, id: int) -> Request:
        request = self._held(id)
        if not request.runs:
            raise ValueError(f"request {id} does not run: {request.phase.value}")
        return request
