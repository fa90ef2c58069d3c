"""Time of the parts of a step on the GPU, from events at the borders of its spans."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass
class _Part:
    name: str
    start: torch.cuda.Event
    stop: torch.cuda.Event


class SpanTimer:
    """A `cptools.spans.Span` that records events; in a graph's capture they become nodes of the graph.

    ``graph``: the spans run while a CUDA graph is captured, and every replay is timed anew. ``hold``: called in
    front of the first span, to keep the GPU busy while the host launches the others; so the times are the GPU's alone.
    Nested spans are all recorded; `times_us` sums the spans of each path of names, such as "layer 0/attend".
    """

    def __init__(self, *, graph: bool = False, hold: Callable[[], object] | None = None) -> None:
        self._graph, self._hold = graph, hold
        self._path: list[str] = []
        self._parts: list[_Part] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not self._path and not self._parts and self._hold is not None:
            self._hold()
        self._path.append(name)
        part = _Part("/".join(self._path), self._event(), self._event())
        part.start.record()
        try:
            yield
        finally:
            part.stop.record()
            self._parts.append(part)
            self._path.pop()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._parts.clear()

    def times_us(self) -> Mapping[str, float]:
        """Waits for the GPU; microseconds of each path since `clear`, or in the last replay."""
        torch.cuda.synchronize()
        times: dict[str, float] = defaultdict(float)
        for part in self._parts:
            times[part.name] += 1e3 * part.start.elapsed_time(part.stop)
        return times

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, external=self._graph)
