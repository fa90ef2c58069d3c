"""Names for the parts of a step, for whoever watches: a profiler's ranges, timers, or nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

Span = Callable[[str], contextlib.AbstractContextManager[None]]
"""Called with the name of a part, gives the context in which it runs. Parts nest."""

_NOTHING: contextlib.nullcontext[None] = contextlib.nullcontext()


def no_span(name: str) -> contextlib.AbstractContextManager[None]:
    """Nobody watches."""
    return _NOTHING


def nvtx_span(name: str) -> contextlib.AbstractContextManager[None]:
    """An NVTX range on the host, which Nsight Systems puts over the kernels launched in it. Needs a build with CUDA.

    Work inside a replayed CUDA graph has no ranges of its own: profile it eagerly to see them.
    """
    return torch.cuda.nvtx.range(name)
