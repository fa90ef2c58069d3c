"""What several op tests need: thread counts, and memory that is only addressed."""

import mmap
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def virtual_bytes() -> Callable[[int], Tensor]:
    """uint8 zeros [n] of which only the pages that are touched take memory, for addresses beyond 2^31."""
    if sys.platform != "linux":
        pytest.skip("reserves address space as Linux does")
    no_reserve = 0x4000  # MAP_NORESERVE, which mmap does not name in Python 3.11
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return lambda size: torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
