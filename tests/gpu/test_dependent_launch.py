"""Kernels that are placed before the one in front of them has ended still see all that it stored."""

import pytest
import torch
from torch import Tensor

from cptools.kernels.kv_gather import copy_rows, gather_rows
from cptools.kernels.kv_store import store_rows
from cptools.kernels.lse_merge import merge_states

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROWS, WIDTH = 200_000, 656


class Chain:
    """Each step reads what the step in front of it wrote; every value passes through all of them."""

    def __init__(self) -> None:
        rows = lambda: torch.zeros(ROWS, WIDTH, dtype=torch.uint8, device=CUDA)
        self.first, self.pages, self.last = rows(), rows(), rows()
        self.slots = torch.randperm(ROWS, device=CUDA)
        self.back = torch.argsort(self.slots)
        self.merged = torch.zeros(ROWS, 4, 80, device=CUDA)

    def __call__(self) -> None:
        for _ in range(3):
            store_rows(self.pages, self.slots, self.first, planes=(WIDTH,), page_size=1, impl="triton")
            gathered = gather_rows(self.pages, self.back, planes=(WIDTH,), page_size=1, impl="triton")
            copy_rows(gathered, self.slots, self.last, self.back, impl="triton")
            copy_rows(self.last, self.back, self.first, self.slots, impl="triton")
        values = self.first[:, :640].view(torch.bfloat16).view(ROWS, 4, 80)
        lse = torch.zeros(ROWS, 4, device=CUDA)
        out, merged_lse = merge_states([values, values], [lse, lse], out_dtype=torch.float32, impl="triton")
        out, _ = merge_states([out, out], [merged_lse, merged_lse], out_dtype=torch.float32, impl="triton")
        self.merged.copy_(out)

    def expected(self, rows: Tensor) -> Tensor:
        """Rows end where they began under `slots` and `back`, three times over."""
        slots, back = self.slots, self.back
        for _ in range(3):
            pages = torch.empty_like(rows)
            pages[slots] = rows
            gathered, last = pages[back], torch.empty_like(rows)
            last[back] = gathered[slots]
            rows = torch.empty_like(rows)
            rows[slots] = last[back]
        return rows


def fill_by_kernel(chain: Chain, rows: Tensor) -> None:
    torch.bitwise_xor(rows, 0, out=chain.first)


def fill_by_copy(chain: Chain, rows: Tensor) -> None:
    chain.first.copy_(rows)


def fill_by_memset(chain: Chain, rows: Tensor) -> None:
    chain.first.copy_(rows)
    chain.first[ROWS // 2 :].zero_()


def fill_on_another_stream(chain: Chain, rows: Tensor) -> None:
    other, here = torch.cuda.Stream(), torch.cuda.current_stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        torch.bitwise_xor(rows, 0, out=chain.first)
    chain.last.zero_()
    here.wait_stream(other)


@pytest.mark.parametrize("fill", [fill_by_kernel, fill_by_copy, fill_by_memset, fill_on_another_stream])
@pytest.mark.parametrize("captured", [False, True])
def test_every_kernel_sees_what_the_one_before_it_stored(fill, captured) -> None:
    chain = Chain()
    source = torch.empty(ROWS, WIDTH, dtype=torch.uint8, device=CUDA)

    def step() -> None:
        fill(chain, source)
        chain()

    step()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for seed in range(3):
        # Bytes below 64 make no NaN and no infinity of BF16.
        source.copy_(torch.randint(seed, 60 + seed, source.shape, dtype=torch.uint8, device=CUDA))
        graph.replay() if captured else step()
        rows = source.clone()
        if fill is fill_by_memset:
            rows[ROWS // 2 :] = 0
        rows = chain.expected(rows)
        assert torch.equal(chain.first, rows)
        torch.testing.assert_close(
            chain.merged, rows[:, :640].view(torch.bfloat16).view(ROWS, 4, 80).float(), rtol=1e-6, atol=1e-37
        )
