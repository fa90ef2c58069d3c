"""A kernel at one shipped tile, so that it can be compiled and inspected without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileSpec:
    """What the compiler needs to know to build a kernel ahead of its first launch.

    signature: Triton types of the arguments by name ("*fp32", "i32", ...), in order, constexprs included as
    "constexpr". constexprs: their values. max_spill_bytes: stack and local memory a thread may use, with the reason
    in a comment where it is not 0.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    gluon: bool = False
    max_spill_bytes: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()
    """Arguments (pointers, strides) that are multiples of 16, as the launcher finds them to be."""
