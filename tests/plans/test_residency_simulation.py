"""Residency under random schedules, and proof that the simulation notices what is wrong."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from cptools.kernels.hot_rows import reference
from cptools.page_allocator import PageAllocator
from cptools.residency import PageState, admission, blocks, copies, pressure, residency, roster, states
from tests.plans.residency_simulation import Copy, Simulation

FAST = [pytest.param(seed, 5_000, id=str(seed)) for seed in range(10)]
LONG = [pytest.param(seed, 20_000, id=f"{seed}-long", marks=pytest.mark.long) for seed in range(200)]


@pytest.mark.parametrize("seed, steps", FAST + LONG)
def test_every_row_is_where_the_state_says_and_nobody_starves(seed, steps):
    Simulation(seed).run(steps)


def test_every_transition_of_the_table_happens(monkeypatch):
    """And all that residency can do about a shortage is done: the schedules are as hard as they should be."""
    seen, totals = Counter(), Counter()

    def counted(state, event):
        seen[state, event] += 1
        return states.after(state, event)

    monkeypatch.setattr(blocks, "after", counted)
    for seed in range(300, 324):
        simulation = Simulation(seed)
        simulation.run(400)
        totals.update(dataclasses.asdict(simulation.residency.counters))
        totals.update(simulation.hot_reads, finished=simulation.finished)
    assert seen.keys() == states.TRANSITIONS.keys()
    assert min(totals.values()) >= 10, totals


def test_the_same_calls_give_the_same_plans():
    """Each rank may keep its own object."""
    plans: list[list] = [[], []]
    for made in plans:
        for seed in range(300, 304):
            simulation = Simulation(seed)
            schedule = simulation.residency.schedule
            simulation.residency.schedule = lambda rows, plan=schedule, made=made: made.append(plan(rows)) or made[-1]
            simulation.run(200)
    assert plans[0] == plans[1]
    assert any(plan.copies for plan in plans[0])


# Planted faults. Each must show within some short runs.


def first_report_completes(monkeypatch):
    def report(self, done):
        missing = self._missing[done.copy]
        missing.discard(done.rank)
        first = len(missing) == self._ranks - 1
        return copies.CopyEnd(done.ok, frozenset()) if first else None

    monkeypatch.setattr(copies.CopyReports, "report", report)


def copies_hold_no_pages(monkeypatch):
    made = blocks._Copy
    monkeypatch.setattr(blocks, "_Copy", lambda kind, rows, index, *pages: made(kind, rows, index, (), (), ()))
    monkeypatch.setattr(PageAllocator, "retain", lambda self, pages: None)


def a_stale_host_copy_stays(monkeypatch):
    right = blocks.BlockStore.rewrite

    def rewrite(self, block):
        if block.state is not PageState.CLEAN:
            right(self, block)

    monkeypatch.setattr(blocks.BlockStore, "rewrite", rewrite)


def dropped_while_copying(monkeypatch):
    """An accounting that calls a page safe as soon as its copy is planned."""
    right = blocks.BlockStore.mirror

    def mirror(self, chosen):
        plan = right(self, chosen)
        for block in chosen:
            self._end_rows(block, True)
        return plan

    monkeypatch.setattr(blocks.BlockStore, "mirror", mirror)


def the_tail_may_leave(monkeypatch):
    monkeypatch.setattr(roster.Roster, "tail", lambda self, request: len(request.blocks))


def a_failed_copy_counts(monkeypatch):
    right = blocks.BlockStore._end_rows
    monkeypatch.setattr(blocks.BlockStore, "_end_rows", lambda self, block, success: right(self, block, True))


def a_failed_copy_leaks(monkeypatch):
    right = blocks.BlockStore._end_rows

    def end(self, block, success):
        if not success:
            self.gpu.retain([block.gpu_page])
        right(self, block, success)

    monkeypatch.setattr(blocks.BlockStore, "_end_rows", end)


def a_page_is_freed_twice(monkeypatch):
    right = blocks.BlockStore.detach_last

    def detach(self, owner):
        block = owner.blocks[-1]
        right(self, owner)
        if not block.owners and block.host_page >= 0:
            self.host.release([block.host_page])

    monkeypatch.setattr(blocks.BlockStore, "detach_last", detach)


def unpinned_without_a_hot_region(monkeypatch):
    def give(self, request):
        for block in request.blocks[: request.tail]:
            self.store.pin(block, -1)

    monkeypatch.setattr(roster.Roster, "give_hot", give)


def tables_are_not_updated(monkeypatch):
    monkeypatch.setattr(residency.Residency, "_updates", lambda self: self._store.touched.clear() or ())


def index_keys_are_not_awaited(monkeypatch):
    right = residency.Residency._load

    def load(self, request, copies, *, first):
        missing = right(self, request, copies, first=first)
        if missing is None:
            request.phase = roster.Phase.RUNNING
        return missing

    monkeypatch.setattr(residency.Residency, "_load", load)


def nobody_gives_way(monkeypatch):
    monkeypatch.setattr(pressure, "_discard_kept", lambda roster: True)


def the_queue_is_a_stack(monkeypatch):
    right = roster.Roster.enter

    def enter(self, known, shared):
        request = right(self, known, shared)
        self.waiting.insert(0, self.waiting.pop())
        return request

    monkeypatch.setattr(roster.Roster, "enter", enter)


def admission_counts_no_pages(monkeypatch):
    monkeypatch.setattr(residency, "fit", lambda roster, request: admission.Fit.HOT)


def damaged_rows_stay(monkeypatch):
    monkeypatch.setattr(roster.Roster, "lose", lambda self, block: None)


def hot_rows_are_not_recognised(monkeypatch):
    right = reference._find
    monkeypatch.setattr(reference, "_find", lambda values, held: (right(values, held)[0], np.zeros(len(values), bool)))


def a_hot_slot_is_called_another(monkeypatch):
    right = reference.resolve_hot_rows

    def resolve(selected, regions, held, order, *tables, page_size):
        made = right(selected, regions, held, order, *tables, page_size=page_size)
        held[:, order[0, 0]] = held[:, order[0, -1]]
        return made

    monkeypatch.setattr(reference, "resolve_hot_rows", resolve)


def copies_overtake_steps(monkeypatch):
    """Not a fault of residency but of a worker that does not keep the order of `CopyPlan`."""
    right = Copy.__init__
    monkeypatch.setattr(Copy, "__init__", lambda self, plan, mark, todo: right(self, plan, 0, todo))


FAULTS = [
    first_report_completes, copies_hold_no_pages, a_stale_host_copy_stays, dropped_while_copying, the_tail_may_leave,
    a_failed_copy_counts, a_failed_copy_leaks, a_page_is_freed_twice, unpinned_without_a_hot_region,
    tables_are_not_updated, index_keys_are_not_awaited, nobody_gives_way, the_queue_is_a_stack,
    admission_counts_no_pages, damaged_rows_stay, hot_rows_are_not_recognised,
    a_hot_slot_is_called_another, copies_overtake_steps,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_simulation_notices(fault, monkeypatch):
    fault(monkeypatch)
    for seed in range(300, 330):
        try:
            Simulation(seed, patience=300).run(600)
        except (AssertionError, ValueError, RuntimeError, KeyError, IndexError):
            return
    pytest.fail(f"{fault.__name__} went unnoticed")
