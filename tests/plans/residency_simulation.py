"""Random schedules of residency against memory in which every row is an integer that is used once.

`Simulation.run` plays the engine, the ranks' workers and the users at once: requests arrive, share prefixes, grow by
chunks and by drafts of which some are rejected, are aborted and preempted; steps run late, copies run later, rank by
rank, and report in any order, now and then as failed; rows are selected and read through hot regions. After every step
`check` compares memory with what residency says, and pages with who holds them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch

from cptools.kernels.hot_rows import FetchPlan, HotRegions, resolve_hot_rows
from cptools.layout import KVLayout
from cptools.residency import CopyDone, CopyKind, PageState, Residency, ResidencySizes

POISON = -7


@dataclass(eq=False)
class Live:
    """A request as its user knows it."""

    known: int
    target: int  # rows after which it is over
    truth: np.ndarray  # [blocks, rows of a block over all ranks], behind the request's tokens anything
    length: int = 0  # rows there are on the device, those of steps not yet committed included
    steps: deque = field(default_factory=deque)  # granted and not committed
    admitted: bool = False
    tables: list = field(default_factory=list)  # [gpu, index, host] of each block, as the plans told
    hot: tuple = ()


@dataclass(eq=False)
class Step:
    live: Live
    rows: int
    accepted: int | None  # None: a chunk of a prompt
    pages: list
    done: bool = False


@dataclass(eq=False)
class Copy:
    plan: object
    mark: int  # steps launched before it
    todo: list  # [rank, whether moved, whether it succeeds, damaged host pages]
    damaged: set = field(default_factory=set)


def random_sizes(rng: random.Random) -> ResidencySizes:
    while True:
        page = rng.choice([2, 4])
        layout = KVLayout(rng.choice([1, 1, 2, 3]), rng.choice([1, page]), page)
        step = rng.randint(4, rng.choice([1, 3]) * layout.virtual_block + 4)
        query_rows, top_k = rng.randint(1, 2), rng.randint(1, page * 2)
        blocks = rng.randint(3, 22)
        most = blocks * layout.virtual_block + rng.randint(0, 3)
        try:
            return ResidencySizes(
                layout=layout,
                gpu_pages=rng.randint(6, blocks + 12),
                index_pages=rng.randint(blocks, 3 * blocks),
                host_pages=rng.choice([0, rng.randint(1, blocks), *[rng.randint(blocks, 4 * blocks)] * 4]),
                max_tokens=max(most, step),
                max_step_tokens=step,
                query_rows=query_rows,
                top_k=top_k,
                hot_rows=query_rows * top_k + rng.choice([0, rng.randint(0, 2 * page)]),
                tail_pages=rng.choice([1, 2, 2, 2]),
                watermark=rng.choice([0, 2, 5]),
                copy_pages=rng.choice([1, 3, 8, 64]),
            )
        except ValueError:
            continue


class Simulation:
    def __init__(self, seed: int, *, sizes: ResidencySizes | None = None, patience: int = 3000) -> None:
        self.rng = random.Random(seed)
        self.sizes = sizes or random_sizes(self.rng)
        self.patience = patience
        self.growth = self.rng.choice([1, 3, 10])
        self.copy_speed = self.rng.choice([2, 4, 12])
        self.residency = Residency(self.sizes)
        layout = self.sizes.layout
        self.block, self.page = layout.virtual_block, layout.page_size
        in_block = np.arange(self.block)
        self.column = layout.owner(in_block) * layout.page_size + layout.local_index(in_block)
        self.in_block = np.argsort(self.column)
        shape = (self.block,)
        self.gpu = np.full((self.sizes.gpu_pages, *shape), POISON)
        self.index = np.full((self.sizes.index_pages, *shape), POISON)
        self.host = np.full((2, self.sizes.host_pages, *shape), POISON)
        self.live: dict[int, Live] = {}
        self.kept: dict[int, np.ndarray] = {}
        self.regions: dict[int, list[HotRegions]] = {}  # of requests with a hot region, one a rank
        self.hot_reads: Counter = Counter()
        self.lost: set = set()  # blocks whose host copy was found to be damaged
        self.queue: deque = deque()  # steps and poisonings, in launch order
        self.launched = self.executed = 0
        self.copies: list[Copy] = []
        self.next_id = 1
        self.free: list[set[int]] = [set(), set(), set()]
        self.stuck = 0
        self.oldest: tuple[int, int] = (0, 0)
        self.last_admitted = 0
        self.finished = 0

    # What happens

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.drain()

    def drain(self) -> None:
        """No more arrivals: everybody gets to the end, and every page is free again."""
        while self.live or self.copies:
            self.step(arrivals=False)
        for handle in self.kept:
            if self.residency.shareable(handle):
                self.residency.forget(handle)
        self.check()
        roster = self.residency.roster
        for pool in (roster.store.gpu, roster.store.index, roster.store.host):
            assert pool.num_free == pool.num_pages

    def step(self, *, arrivals: bool = True) -> None:
        rng = self.rng
        if arrivals:
            if len(self.live) < 14 and rng.random() < 0.4:
                self.arrive()
            self.interfere()
        wants = self.wants()
        plan = self.residency.schedule(wants)
        self.check_order()
        self.apply(plan, wants)
        self.poison_free_pages()
        for _ in range(rng.randrange(3)):
            self.execute()
        if rng.random() < 0.1:
            self.read_selected()
        self.work_on_copies()
        self.commit_some()
        self.check()
        self.watch_progress()

    def arrive(self) -> None:
        rng, sizes = self.rng, self.sizes
        known = rng.randint(1, rng.choice([min(sizes.max_tokens, 3 * self.block), sizes.max_tokens]))
        target = min(known + rng.randint(0, self.growth * self.block), sizes.max_tokens)
        truth = np.full((sizes.blocks(sizes.max_tokens), self.block), -1)
        sources = [*self.live, *self.kept]
        source, blocks = (rng.choice(sources), 0) if sources and rng.random() < 0.6 else (None, 0)
        if source is not None:
            there = min(self.residency.shareable(source), (known - 1) // self.block)
            blocks = rng.choice([there, rng.randint(0, there)])
            of = self.live[source].truth if source in self.live else self.kept[source]
            truth[:blocks] = of[:blocks]
        request = self.residency.add(known, shares=source, blocks=blocks)
        self.live[request] = Live(known, target, truth, blocks * self.block)

    def interfere(self) -> None:
        rng, dice = self.rng, self.rng.random()
        if dice < 0.01 and self.live:
            self.end(rng.choice(list(self.live)), keep=rng.random() < 0.5)
        elif dice < 0.03:
            quiet = [id for id in self.residency.running if not self.live[id].steps]
            if quiet:
                request = rng.choice(quiet)
                self.residency.preempt(request)
                self.live[request].admitted = False
        elif dice < 0.035 and self.kept:
            handle = rng.choice(list(self.kept))
            if self.residency.shareable(handle):
                self.residency.forget(handle)
            del self.kept[handle]

    def wants(self) -> dict[int, int]:
        rng, most = self.rng, self.sizes.max_step_tokens
        wants = {}
        for request in self.residency.running:
            live = self.live[request]
            outstanding = sum(step.rows for step in live.steps)
            held = self.residency.tokens(request) + outstanding
            if rng.random() < 0.3:
                continue
            # The host does not wait for tokens, so it counts drafts as if all were accepted.
            rows = rng.randint(1, most) if held < live.known else rng.randint(1, 4)
            left = live.known - held if held < live.known else live.target - held
            rows = min(rows, left, most - outstanding)
            if rows > 0:
                wants[request] = rows
        return wants

    def apply(self, plan, wants: dict[int, int]) -> None:
        for request in plan.preempted:
            assert not self.live[request].steps
            self.live[request].admitted = False
        for each in plan.admitted:
            live, places = self.live[each.request], self.residency.places(each.request)
            live.admitted, live.length, live.hot = True, each.cached_tokens, places.hot_pages
            columns = (places.gpu_pages, places.index_pages, places.host_pages)
            live.tables = [list(row) for row in zip(*columns, strict=True)]
            assert each.cached_tokens == self.residency.tokens(each.request)
        for update in plan.updates:
            tables = self.live[update.request].tables
            while len(tables) <= update.block:
                tables.append([-1, -1, -1])
            tables[update.block] = [update.gpu_page, update.index_page, update.host_page]
        for region in plan.hot:
            self.live[region.request].hot = region.pages
            self.regions.pop(region.request, None)
            if region.pages:
                ranks = range(self.sizes.layout.world_size)
                self.regions[region.request] = [HotRegions.empty(1, self.sizes.hot_rows) for _ in ranks]
        for request, live in self.live.items():
            if live.admitted:  # what the plans told since it was admitted is all that there is to know
                blocks = self.residency.roster.requests[request].blocks
                assert live.tables == [list(block.places()) for block in blocks], "a table was not updated"
        assert set(plan.granted) | set(plan.waiting) | set(plan.preempted) >= set(wants)
        for request in plan.granted:
            live, rows = self.live[request], wants[request]
            prompt = self.residency.tokens(request) + sum(s.rows for s in live.steps) < live.known
            step = Step(live, rows, None if prompt else self.rng.randint(1, rows), [row[:2] for row in live.tables])
            live.steps.append(step)
            self.launch(step)
        for copy in plan.copies:
            moved = [sum(run.count for run in runs) for runs in (copy.rows, copy.index)]
            assert 0 < max(moved) <= self.sizes.copy_pages
            ranks = range(self.sizes.layout.world_size)
            todo = [[rank, False, self.rng.random() > 0.03, self.some_damage(copy)] for rank in ranks]
            self.copies.append(Copy(copy, self.launched, todo))

    def launch(self, item) -> None:
        self.queue.append(item)
        self.launched += 1

    def flat(self, positions: np.ndarray) -> np.ndarray:
        return positions // self.block * self.block + self.column[positions % self.block]

    def execute(self) -> None:
        """The GPU runs what was launched first."""
        if not self.queue:
            return
        item = self.queue.popleft()
        self.executed += 1
        if not isinstance(item, Step):
            for memory, pages in item:
                memory[..., pages, :] = POISON
            return
        live, rows = item.live, item.rows
        accepted = rows if item.accepted is None else item.accepted
        positions = np.arange(live.length, live.length + rows)
        ids = np.arange(self.next_id, self.next_id + rows)
        self.next_id += rows
        pages = np.array(item.pages)[positions // self.block]
        columns = self.column[positions % self.block]
        self.gpu[pages[:, 0], columns] = ids
        self.index[pages[:, 1], columns] = ids + (1 << 40)
        live.truth.reshape(-1)[self.flat(positions[:accepted])] = ids[:accepted]
        live.length += accepted
        item.accepted, item.done = accepted, True

    def commit_some(self) -> None:
        for request in list(self.live):
            live = self.live[request]
            while live.steps and live.steps[0].done and self.rng.random() < 0.7:
                step = live.steps.popleft()
                self.residency.commit(request, step.rows, step.accepted)
            if live.admitted and not live.steps and self.residency.tokens(request) >= live.target:
                self.finished += 1
                self.end(request, keep=self.rng.random() < 0.4)

    def end(self, request: int, *, keep: bool) -> None:
        live = self.live.pop(request)
        self.regions.pop(request, None)
        blocks = self.rng.randint(0, self.residency.shareable(request)) if keep else 0
        handle = self.residency.finish(request, keep_blocks=blocks)
        assert (handle is None) == (blocks == 0)
        if handle is not None:
            self.kept[handle] = live.truth[:blocks].copy()
        self.kept = {handle: truth for handle, truth in self.kept.items() if self.residency.shareable(handle)}
        if len(self.kept) > 6:
            oldest = min(self.kept)
            self.residency.forget(oldest)
            del self.kept[oldest]

    def read_selected(self) -> None:
        """A request with a hot region reads rows that are selected at random, near each other, on every rank."""
        able = [id for id in self.residency.running if id in self.regions and self.residency.tokens(id)]
        if not able:
            return
        while self.queue:
            self.execute()
        request, sizes, layout = self.rng.choice(able), self.sizes, self.sizes.layout
        truth, tokens = self.live[request].truth.reshape(-1), self.residency.tokens(request)
        places = self.residency.places(request)
        tables = {f"{name}_tables": torch.tensor([getattr(places, f"{name}_pages")]) for name in ("gpu", "host", "hot")}
        for _ in range(self.rng.randint(1, 3)):
            first = self.rng.randrange(tokens) if self.rng.random() < 0.4 else request * 7 % tokens
            near = [
                min(tokens - 1, first + self.rng.randrange(2 * self.block)) if self.rng.random() < 0.9 else -1
                for _ in range(sizes.query_rows * sizes.top_k)
            ]
            positions = np.array(near).reshape(1, sizes.query_rows, sizes.top_k)
            for rank, region in enumerate(self.regions[request]):
                mine = (positions >= 0) & (layout.owner(positions) == rank)
                local = np.where(mine, layout.local_index(np.maximum(positions, 0)), -1)
                plan = resolve_hot_rows(
                    torch.from_numpy(local), torch.tensor([0]), region, **tables, page_size=self.page
                )
                self.fetch(plan, rank)
                slots = plan.slots.numpy()
                assert ((slots >= 0) == mine).all(), "a selected row was not found"
                rows = self.rank_rows(self.gpu, rank)
                assert (rows(slots[mine]) == truth[self.flat(positions[mine])]).all(), "a selected row is another"
                order, held = region.order[0].numpy(), region.held[0].numpy()
                assert (np.sort(order) == np.arange(len(order))).all(), "the LRU is no permutation"
                hot = np.flatnonzero(held >= 0)
                assert len(set(held[hot])) == len(hot), "a row is hot twice"
                slots = np.array(places.hot_pages)[hot // self.page] * self.page + hot % self.page
                of = self.flat(layout.position(rank, held[hot]))
                assert (rows(slots) == truth[of]).all(), "a hot row is another"
                self.hot_reads.update(hits=int(plan.counts[0, 0]), misses=int(plan.counts[0, 1]))

    def rank_rows(self, memory: np.ndarray, rank: int):
        """The rows of a rank's pages, by slot."""
        return lambda slots: memory[slots // self.page, rank * self.page + slots % self.page]

    def fetch(self, plan: FetchPlan, rank: int) -> None:
        count = int(plan.counts[0, 1])
        targets, sources = plan.targets[0, :count].numpy(), plan.sources[0, :count].numpy()
        rows = self.rank_rows(self.host[0], rank)(sources)
        self.gpu[targets // self.page, rank * self.page + targets % self.page] = rows

    def work_on_copies(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(self.copy_speed)):
            if not self.copies:
                return
            copy = rng.choice(self.copies)
            part = rng.choice(copy.todo)
            rank, moved, ok, damaged = part
            if not moved:
                while self.executed < copy.mark:
                    self.execute()
                self.move(copy.plan, rank, ok)
                part[1] = True
                if rng.random() < 0.5:
                    continue
            copy.todo.remove(part)
            if not copy.todo:
                self.copies.remove(copy)
            copy.damaged.update(damaged)
            if not copy.todo:
                self.lost.update(block for block in self.blocks() if block.host_page in copy.damaged)
            self.residency.completed(CopyDone(copy.plan.copy, rank, ok, damaged))

    def some_damage(self, plan) -> tuple[int, ...]:
        if plan.kind is CopyKind.MIRROR or self.rng.random() > 0.12:
            return ()
        run = self.rng.choice(plan.rows + plan.index)
        return (run.source + self.rng.randrange(run.count),)

    def blocks(self):
        roster = self.residency.roster
        return [block for owner in (*roster.requests.values(), *roster.kept.values()) for block in owner.blocks]

    def move(self, plan, rank: int, ok: bool) -> None:
        mine = slice(rank * self.page, (rank + 1) * self.page)
        for runs, device, host in ((plan.rows, self.gpu, self.host[0]), (plan.index, self.index, self.host[1])):
            source, target = (device, host) if plan.kind is CopyKind.MIRROR else (host, device)
            for run in runs:
                rows = source[run.source : run.source + run.count, mine]
                target[run.target : run.target + run.count, mine] = rows if ok else POISON

    def poison_free_pages(self) -> None:
        store, work = self.residency.roster.store, []
        for i, (pool, memory) in enumerate(((store.gpu, self.gpu), (store.index, self.index), (store.host, self.host))):
            free = {page for page, users in enumerate(pool.counts()) if not users}
            new = free - self.free[i]
            if new:
                work.append((memory, list(new)))
            self.free[i] = free
        if work:
            self.launch(work)

    # What must hold

    def check(self) -> None:
        self.check_rows()
        self.check_pages()

    def check_order(self) -> None:
        """Requests leave the queue in order of arrival; only those that were sent back are behind others."""
        roster = self.residency.roster
        newest = max(roster.admitted, default=0)
        passed = [id for id in roster.waiting if self.last_admitted < id < newest]
        assert not passed, f"request {newest} was admitted before {passed}"
        self.last_admitted = max(newest, self.last_admitted)

    def check_rows(self) -> None:
        """Every row that is there for good is where its request's places say, in each of them."""
        residency = self.residency
        truths, ends, gpu, index, host = [], [], [], [], []  # ends: rows from a block's first to the request's last
        running = set(residency.running)
        for request, live in self.live.items():
            places = residency.places(request)
            tokens = residency.tokens(request)
            blocks = -(-tokens // self.block)
            assert blocks <= len(places.gpu_pages)
            truths.append(live.truth[:blocks])
            ends += range(tokens, 0, -self.block)
            gpu += places.gpu_pages[:blocks]
            index += places.index_pages[:blocks]
            host += places.host_pages[:blocks]
            if request in running:
                assert min(places.index_pages, default=0) >= 0, "index keys of a running request are not on the GPU"
                tail = max(0, min(tokens // self.block, len(places.gpu_pages) - self.sizes.tail_pages))
                assert min(places.gpu_pages[tail:], default=0) >= 0, "the tail left the GPU"
                assert places.hot_pages or min(places.gpu_pages, default=0) >= 0, "rows in host memory, no hot region"
        for handle, truth in self.kept.items():
            blocks = residency.shareable(handle)
            if blocks:
                columns = [block.places() for block in residency.roster.kept[handle].blocks]
                truths.append(truth[:blocks])
                ends += [self.block] * blocks
                gpu += [c[0] for c in columns]
                index += [c[1] for c in columns]
                host += [c[2] for c in columns]
        if not truths:
            return
        truth = np.concatenate(truths)
        pages = np.array([gpu, index, host], dtype=np.int64)
        there = pages >= 0
        assert (there[0] | there[2]).all(), "a row is nowhere"
        assert (there[1] | there[2]).all(), "an index key is nowhere"
        missing = self.in_block >= np.array(ends)[:, None]
        keys = truth + (1 << 40)
        for memory, row, want in (
            (self.gpu, 0, truth), (self.index, 1, keys), (self.host[0], 2, truth), (self.host[1], 2, keys)
        ):  # fmt: skip
            some = there[row]
            equal = (memory[pages[row, some]] == want[some]) | missing[some]
            assert equal.all(), f"memory {row} does not hold what the state says"

    def check_pages(self) -> None:
        """Pages are held exactly by blocks, copies under way and hot regions; sets and counters say what is."""
        roster = self.residency.roster
        store = roster.store
        pools = (store.gpu, store.index, store.host)
        held = [[0] * (pool.num_pages + 1) for pool in pools]  # the last one counts -1, no page
        for users, pages in zip(held, store.pages_held(), strict=True):
            for page in pages:
                users[page] += 1
        pins: dict = {}
        active: dict = {}
        admitted = set(roster.admitted)
        for request in roster.requests.values():
            for page in request.hot:
                held[0][page] += 1
            assert not request.hot or len(request.hot) * self.page >= self.sizes.query_rows * self.sizes.top_k
            if request.id in admitted:
                first = request.tail if request.hot else 0
                for block in request.blocks:
                    active[block] = active.get(block, 0) + 1
                    pins[block] = pins.get(block, 0) + (block.number >= first)
                live = self.live[request.id]
                assert not live.admitted or live.hot == request.hot
            else:
                assert not request.hot
        blocks: dict = {}
        for owner in (*roster.requests.values(), *roster.kept.values()):
            states = [block.state for block in owner.blocks]
            assert owner.absent == len(states) - sum([state.on_gpu for state in states])
            assert owner.copied == sum([state.on_host for state in states])
            assert [block.number for block in owner.blocks] == list(range(len(states)))
            blocks.update(dict.fromkeys(owner.blocks))
        gpu, index, host = held
        evictable, dirty = set(), set()
        for block in blocks:
            state = block.state
            pinned, used = pins.get(block, 0), active.get(block, 0)
            assert (block.gpu_page >= 0) == (state is not PageState.HOST)
            assert (block.host_page >= 0) == (state is not PageState.DIRTY)
            assert block.pins == pinned
            assert block.active == used
            if state is PageState.EVICTABLE:
                assert not pinned
                assert store.gpu.users(block.gpu_page) == 1
                evictable.add(block)
            elif state is PageState.CLEAN:
                assert pinned
            elif state is PageState.DIRTY and not used:
                dirty.add(block)
            gpu[block.gpu_page] += 1
            index[block.index_page] += 1
            host[block.host_page] += 1
        for pool, users in zip(pools, held, strict=True):
            assert pool.counts() == tuple(users[:-1]), "pages are held by others than those known"
        assert store.evictable.keys() == evictable
        self.lost = {block for block in self.lost if block.owners}
        for owner in [owner for block in self.lost for owner in block.owners]:
            assert getattr(owner, "id", 0) in roster.damaged, "a damaged row may be read"
        assert store.idle_dirty.keys() == dirty

    def watch_progress(self) -> None:
        """The oldest request moves on."""
        if not self.live:
            self.oldest, self.stuck = (0, 0), 0
            return
        oldest = min(self.live)
        now = (oldest, self.residency.tokens(oldest))
        self.stuck = self.stuck + 1 if now == self.oldest else 0
        self.oldest = now
        assert self.stuck < self.patience, f"request {oldest} starves"
