"""A decode step's attention in a CUDA graph over persistent buffers: without a sync, and the bits of an eager step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cptools.formats import FP8
from cptools.kernels.selected_slots import choose_selected_slots, selected_slots
from cptools.layout import KVLayout
from cptools.step_rows import DecodeRows
from tests.decode_problem import GLM, DecodeProblem

pytestmark = pytest.mark.gpu

PAGES = 256
WIDTH = 80  # blocks of a table: 5120 tokens


class Buffers:
    """What a graph reads: context lengths, tables and the projections of the new rows, refilled in place."""

    def __init__(self, problem: DecodeProblem, requests: int, per_request: int) -> None:
        self.problem, self.per_request = problem, per_request
        self.contexts = torch.full((requests,), -1, device="cuda")
        self.tables = torch.full((requests, WIDTH), -1, device="cuda")
        self.given = problem.new_rows(requests * per_request)

    def fill(self, contexts: list[int]) -> None:
        tables = self.problem.tables(contexts, self.per_request, width=WIDTH)
        self.contexts.copy_(torch.tensor(contexts))
        self.tables.copy_(tables)
        for name, value in self.problem.new_rows(len(contexts) * self.per_request).items():
            self.given[name].copy_(value)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = DecodeRows.of_buffers(self.problem.cache.kv, self.contexts, self.tables, per_request=self.per_request)
        return self.problem.run(rows, self.given)


def glm(dtype: torch.dtype = torch.bfloat16) -> DecodeProblem:
    return DecodeProblem(GLM, FP8, num_pages=PAGES, dtype=dtype, device="cuda")


def capture(buffers: Buffers) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Warmed up and captured with nothing but padding in the buffers."""
    buffers.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = buffers.run()
    return graph, outs


@pytest.mark.parametrize("per_request", [1, 4])
def test_replays_equal_eager_steps_while_lengths_and_tables_change(per_request: int) -> None:
    """Field cases A21 and B12: captured with no live request, replayed over 50 mixes of lengths and padding; D17:
    contexts around 2048; D19: tables of which every request uses another width."""
    problem = glm()
    buffers = Buffers(problem, 6, per_request)
    graph, outs = capture(buffers)
    generator = torch.Generator().manual_seed(1)
    for replay in range(50):
        contexts = torch.randint(-1, 2300, (6,), generator=generator).tolist()
        contexts[replay % 6] = [0, -1, 2047, 2048, 2049, 4096][replay // 6 % 6]
        buffers.fill(contexts)
        before = problem.cache.mla_rows.pages.clone(), problem.cache.index_rows.pages.clone()
        graph.replay()
        got = [*(out.clone() for out in outs), problem.cache.mla_rows.pages.clone()]
        problem.cache.mla_rows.pages.copy_(before[0])
        problem.cache.index_rows.pages.copy_(before[1])
        want = [*buffers.run(), problem.cache.mla_rows.pages]
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other), (replay, contexts)


@pytest.mark.parametrize("per_request", [1, 2, 3, 4, 5, 7])
def test_step_equals_the_cpu(per_request: int) -> None:
    """Field case D15: odd numbers of rows a request. The same cache and rows in float32 on the CPU."""
    problem = glm()
    contexts = [2047, -1, 0, 4096, 63]
    buffers = Buffers(problem, len(contexts), per_request)
    buffers.fill(contexts)
    reference = DecodeProblem(GLM, FP8, num_pages=PAGES)
    reference.cache.mla_rows.pages.copy_(problem.cache.mla_rows.pages)
    reference.cache.index_rows.pages.copy_(problem.cache.index_rows.pages)
    reference.latent_norm = problem.latent_norm.cpu().float()
    reference.key_norm = tuple(x.cpu().float() for x in problem.key_norm)
    # Index queries are rotated in the dtype that they come in, and FP8 would turn another rounding into other scores.
    given = {
        name: value.cpu() if name == "index_query" else value.cpu().float() for name, value in buffers.given.items()
    }
    rows = DecodeRows.of_buffers(
        reference.cache.kv, buffers.contexts.cpu(), buffers.tables.cpu(), per_request=per_request
    )
    got, want = [out.cpu() for out in buffers.run()], reference.run(rows, given)
    lens = rows.kv_lens
    for row, seen in enumerate(lens.tolist()):
        ours, theirs = set(got[2][row].tolist()), set(want[2][row].tolist())
        # A new row's key is rounded twice in BF16 and once in float32, and may cross another near the threshold.
        assert len(ours ^ theirs) <= 8, row
        assert ours - {-1} <= set(range(seen))
        assert (got[2][row, 1:] >= got[2][row, :-1])[got[2][row, 1:] >= 0].all()
    for ours, theirs in zip(got[:2], want[:2], strict=True):
        assert (ours.float() - theirs).norm() <= 0.02 * theirs.norm()
        assert (ours[lens == 0] == 0).all()


def test_no_sync_in_a_step() -> None:
    buffers = Buffers(glm(), 8, 2)
    buffers.fill([5, 3000, -1, -1, 100, 2048, 0, 64])
    buffers.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffers.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (2, 1), (3, 4), (8, 64)])
def test_selected_slots_kernel_equals_the_reference(world_size: int, interleave: int) -> None:
    layout = KVLayout(world_size, interleave, 64)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(60, generator=generator).view(4, 15)
    tables[3, 4:] = -1
    positions = torch.randint(-2, 15 * layout.virtual_block + 9, (9, 2048), generator=generator)
    positions[0, :4] = torch.tensor([2**40, 2**31, 2**31 - 1, 2**32 + 5])
    ids = torch.randint(-1, 5, (9,), generator=generator)
    for rank in range(world_size):
        for dtype in (torch.int32, torch.int64):
            want, got = (torch.full((9, 2048), 77, dtype=dtype, device=device) for device in ("cpu", "cuda"))
            selected_slots(want, positions, ids, tables, layout=layout, rank=rank)
            given = positions.cuda(), ids.cuda(), tables.cuda()
            assert choose_selected_slots(given[0], given[2]).impl == "triton"
            selected_slots(got, *given, layout=layout, rank=rank)
            assert torch.equal(got.cpu(), want)
    torch.library.opcheck(
        torch.ops.cptools.selected_slots, (got, *given, world_size, interleave, 64, 0), test_utils="test_schema"
    )
