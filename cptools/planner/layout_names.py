"""Names of ways to split an engine: "PCP8xDCP8" is ``ParallelConfig(pcp=8, dcp=8)``."""

from __future__ import annotations

import re

from cptools.parallel_config import ParallelConfig

_PART = re.compile(r"(DP|PCP|DCP|TP|EP)([1-9][0-9]*)")


def standard_layouts(gpus: int) -> tuple[str, ...]:
    """The names of the four ways to use all of ``gpus`` alike."""
    return (f"DP{gpus}", f"TP{gpus}", f"PCP{gpus}", f"PCP{gpus}xDCP{gpus}")


def named_layout(name: str, *, num_experts: int) -> ParallelConfig:
    """The sizes of a layout: parts DP, PCP, DCP, TP, EP with their numbers, joined by "x", in any case and order.

    Without an EP part, experts are split over the whole world if that divides them and TP does not already split them
    over all of it.

    Raises ValueError for a name that is none, a part that comes twice, or sizes that do not go together.
    """
    parts = [_PART.fullmatch(part) for part in name.upper().split("X")]
    sizes = {match[1].lower(): int(match[2]) for match in parts if match}
    if len(sizes) != len(parts):
        raise ValueError(f"layout {name!r} is not parts of DP, PCP, DCP, TP, EP, each once, such as PCP8xDCP8")
    config = ParallelConfig(**{**sizes, "ep": 1})
    world = config.world_size
    if "ep" in sizes:
        return ParallelConfig(**sizes)
    return ParallelConfig(**sizes, ep=1 if config.tp == world or num_experts % world else world)
