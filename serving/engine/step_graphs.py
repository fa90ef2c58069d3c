"""Functions of fixed shapes, replayed as CUDA graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class StepGraphs:
    """Captures a function once for each key and replays it; without graphs it calls the function.

    All graphs share one memory pool: what one returns is valid until another is replayed.
    """

    def __init__(self, *, capture: bool) -> None:
        self.capture = capture
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return not self.capture or key in self._graphs

    def record(self, key: Hashable, run: Callable[[], Tensor]) -> None:
        """Capture ``run`` under a key: it is called twice for kernels that compile or tune themselves, then captured.

        It must read its inputs from buffers that stay, and may change nothing that matters: the calls are real. Waits
        for the GPU.
        """
        if not self.capture:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        self._graphs[key] = graph, out

    def run(self, key: Hashable, run: Callable[[], Tensor]) -> Tensor:
        """Replay what was recorded under the key, or call ``run``. No sync."""
        if not self.capture:
            return run()
        graph, out = self._graphs[key]
        graph.replay()
        return out
