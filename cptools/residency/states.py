"""Where the rows of one virtual block may be, and how that may change: one table, and the picture drawn from it."""

from __future__ import annotations

from enum import Enum


class PageState(Enum):
    """Where a block's rows can be read, in words; on the GPU? in host memory, in a copy that every rank completed?"""

    DIRTY = "on the GPU only", True, False
    COPYING = "on the GPU; its host copy is under way", True, False
    CLEAN = "on the GPU and in host memory; somebody needs the GPU's copy", True, True
    EVICTABLE = "on the GPU and in host memory; all who read it can read host memory", True, True
    HOST = "in host memory only", False, True
    FETCHING = "in host memory; its GPU copy is under way", False, True

    def __init__(self, words: str, on_gpu: bool, on_host: bool) -> None:
        self.words, self.on_gpu, self.on_host = words, on_gpu, on_host

    __hash__ = object.__hash__  # members are unique, and these are looked up for each change of each block


class PageEvent(Enum):
    """What changes a state. The value says when it happens."""

    MIRROR = "a host page is taken and the copy to it planned"
    COPIED = "every rank reported the copy complete"
    FAILED = "a rank reported that its copy failed"
    REWRITE = "a step may write into the page, so the host copy is given up"
    UNPIN = "the last of those left who need it on the GPU"
    PIN = "somebody needs it on the GPU"
    DROP = "its GPU page is needed elsewhere"
    FETCH = "a GPU page is taken and the copy to it planned"

    __hash__ = object.__hash__


class IllegalTransition(RuntimeError):
    """An event that the table does not have for a state: a bug of the caller, never a matter of load."""


TRANSITIONS: dict[tuple[PageState, PageEvent], PageState] = {
    (PageState.DIRTY, PageEvent.MIRROR): PageState.COPYING,
    (PageState.COPYING, PageEvent.COPIED): PageState.CLEAN,
    (PageState.COPYING, PageEvent.FAILED): PageState.DIRTY,
    (PageState.CLEAN, PageEvent.REWRITE): PageState.DIRTY,
    (PageState.CLEAN, PageEvent.UNPIN): PageState.EVICTABLE,
    (PageState.EVICTABLE, PageEvent.PIN): PageState.CLEAN,
    (PageState.EVICTABLE, PageEvent.DROP): PageState.HOST,
    (PageState.HOST, PageEvent.FETCH): PageState.FETCHING,
    (PageState.FETCHING, PageEvent.COPIED): PageState.CLEAN,
    (PageState.FETCHING, PageEvent.FAILED): PageState.HOST,
}
"""A block begins DIRTY and may be forgotten in any state; a copy under way then keeps the pages until it reports."""


def after(state: PageState, event: PageEvent) -> PageState:
    """The state that follows. Raises IllegalTransition where the table has none."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} in state {state.name}") from None


def drawing() -> str:
    """The table as a Mermaid state diagram, for the documents."""
    lines = ["stateDiagram-v2", "    [*] --> DIRTY: a step writes it"]
    lines += [f"    {state.name} --> {TRANSITIONS[state, event].name}: {event.name}" for state, event in TRANSITIONS]
    return "\n".join(lines)


def state_rows() -> str:
    """The states and events as two Markdown tables, for the documents."""
    states = [f"| `{s.name}` | {s.words} | {_yes(s.on_gpu)} | {_yes(s.on_host)} |" for s in PageState]
    events = [f"| `{e.name}` | {e.value} |" for e in PageEvent]
    head = ["| state | a block's rows are | GPU page readable | host page readable |", "|---|---|---|---|"]
    return "\n".join([*head, *states, "", "| event | when |", "|---|---|", *events])


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
