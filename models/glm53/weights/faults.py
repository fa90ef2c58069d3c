"""What a refusal says of many faults of one kind: the first, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 20


def fault_lines(faults: Sequence[str]) -> str:
    """One line a fault; a checkpoint of another model has tens of thousands."""
    more = [f"and {len(faults) - _NAMED:,} more like these"] if len(faults) > _NAMED else []
    return "\n".join(f"- {fault}" for fault in [*faults[:_NAMED], *more])
