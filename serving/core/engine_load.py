"""What was sent to an engine and is not done: its queue in seconds, its contexts in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum


class EngineState(Enum):
    """READY takes requests. DRAINING finishes those it has. DOWN has none."""

    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass
class EngineLoad:
    """Outstanding work of one engine. Sums are exact whatever came and went before (fsum), so equal loads tie."""

    state: EngineState = EngineState.READY
    prefills: dict[str, float] = field(default_factory=dict)  # request -> seconds still to compute
    contexts: dict[str, int] = field(default_factory=dict)  # request -> tokens that it keeps in the cache
    last_dispatch: int = 0  # number of the dispatch that chose this engine last; ties go to the one that waits longest

    @property
    def requests(self) -> set[str]:
        return self.prefills.keys() | self.contexts.keys()

    @property
    def queue_seconds(self) -> float:
        return math.fsum(self.prefills.values())

    @property
    def context_tokens(self) -> int:
        return sum(self.contexts.values())

    def finish(self, request: str) -> None:
        self.prefills.pop(request, None)
        self.contexts.pop(request, None)
