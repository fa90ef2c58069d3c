"""Launching one Triton kernel many times: what depends on the kinds of its arguments alone is found out once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Relaunched:
    """A kernel whose launches have arguments of the same kinds.

    Kinds are types and dtypes, and for numbers and addresses that the kernel specialises on, whether they are 1 or
    multiples of 16. Only the first launch looks at them; the others cost the host a fraction of an ordinary launch.
    constants: all constexpr parameters, which must be the last ones, in order. options: num_warps and the like.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._options = options
        self._compiled: Any = None

    def __call__(self, stream: torch.cuda.Stream, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on a stream of the current device."""
        if self._compiled is None:
            with torch.cuda.stream(stream):
                self._compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
        else:
            self._compiled[grid](*arguments, *self._constants.values(), stream=stream.cuda_stream)
