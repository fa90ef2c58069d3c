"""Indexer scores and fused selection on the GPU against the reference, for every implementation.

Small integers and power-of-two scales make every score exact in any order of summation, ties included, so that
implementations must agree bit for bit; random values are held to fp64.
"""

import math

import pytest
import torch
from torch import Tensor

from cptools.formats import FP8, FP8_INDEX, quantize_fp8
from cptools.kernels.indexer_topk import (
    IndexKeys,
    choose_indexer_scores,
    indexer_scores,
    indexer_scores_fp8,
    indexer_topk,
    indexer_topk_fp8,
)
from cptools.kernels.topk_select import topk_select

pytestmark = pytest.mark.gpu

KERNELS = ["triton", "gluon"]


@pytest.fixture(autouse=True)
def poisoned_gpu_memory() -> None:
    """Freed blocks full of NaN are what the next torch.empty returns, so an element never written shows."""
    torch.full((64 << 20,), math.nan, device="cuda")


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator(seed), device="cuda").float()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), device="cuda")


def ids(values: list[int]) -> Tensor:
    return torch.tensor(values, device="cuda")


def exact_queries(rows: int, heads: int, seed: int, dim: int = 128) -> tuple[Tensor, Tensor]:
    return integers(rows, heads, dim, seed=seed).to(FP8), integers(rows, heads, seed=seed + 1)


def exact_keys(count: int, seed: int, dim: int = 128) -> IndexKeys:
    scales = torch.exp2(integers(count, seed=seed + 1))
    return IndexKeys(integers(count, dim, seed=seed).to(FP8), scales)


def paged(keys: IndexKeys, lens: list[int], page_size: int, seed: int) -> IndexKeys:
    """The keys of several requests (back to back) in shuffled pages, NaN wherever no key is."""
    blocks = max(1, max(-(-length // page_size) for length in lens))
    total = len(lens) * blocks + 3
    order = torch.randperm(total, generator=generator(seed), device="cuda")
    pages = torch.full((total, page_size * FP8_INDEX.row_bytes), 0x7F, dtype=torch.uint8, device="cuda")
    tables = order[: len(lens) * blocks].view(len(lens), blocks)
    start = 0
    for request, length in enumerate(lens):
        for block in range(-(-length // page_size)):
            count = min(page_size, length - block * page_size)
            part = slice(start + block * page_size, start + block * page_size + count)
            page = pages[tables[request, block]]
            page[: count * 128] = keys.values[part].view(torch.uint8).flatten()
            page[page_size * 128 :][: count * 4] = keys.scales[part].view(torch.uint8)
        tables[request, -(-length // page_size) :] = 2147480000
        start += length
    return IndexKeys.from_pages(pages, tables, page_size=page_size)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 130])
def test_one_sequence_is_bit_equal_to_the_reference(impl: str, heads: int, rows: int) -> None:
    count = 1000
    query, weights = exact_queries(rows, heads, seed=rows)
    keys = exact_keys(count, seed=7)
    lens = torch.linspace(0, count + 5, rows, device="cuda").long()
    expected = indexer_scores_fp8(query, weights, keys, kv_lens=lens, impl="reference")
    for columns in (None, 1, 333, 2000):
        scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens, columns=columns, impl=impl)
        wanted = expected if columns is None else torch.full((rows, columns), -math.inf, device="cuda")
        if columns is not None:
            wanted[:, :count] = expected[:, :columns]
        assert torch.equal(scores, wanted)
    unfilled = indexer_scores_fp8(query, weights, keys, kv_lens=lens, fill=False, impl=impl)
    seen = torch.arange(count, device="cuda") < lens.unsqueeze(1)
    assert torch.equal(unfilled.where(seen, -math.inf), expected)


@pytest.mark.parametrize("impl", KERNELS)
def test_sequences_start_anywhere_and_cut_through_groups(impl: str) -> None:
    sizes, rows = [300, 1, 0, 65, 700, 2], [3, 1, 2, 1, 9, 2]
    starts, lens = [], []
    for number, (size, count) in enumerate(zip(sizes, rows, strict=True)):
        starts += [sum(sizes[:number])] * count
        lens += [size - count + 1 + i if size >= count else size for i in range(count)]
    query, weights = exact_queries(sum(rows), 32, seed=3)
    keys = exact_keys(sum(sizes), seed=4)
    given = {"kv_lens": ids(lens), "key_starts": ids(starts)}
    expected = indexer_scores_fp8(query, weights, keys, **given, impl="reference")
    assert torch.equal(indexer_scores_fp8(query, weights, keys, **given, impl=impl), expected)
    for k in (1, 64, 500):
        wanted = indexer_topk_fp8(query, weights, keys, **given, k=k, impl="reference")
        for workspace in (1 << 30, 1):
            found = indexer_topk_fp8(query, weights, keys, **given, k=k, impl=impl, workspace_bytes=workspace)
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("page_size", [64, 256])
def test_pages_give_what_contiguous_keys_give(impl: str, heads: int, queries: int, page_size: int) -> None:
    lens = [1, 700, 64, 65, 0, 1300]
    keys = exact_keys(sum(lens), seed=5)
    pages = paged(keys, lens, page_size, seed=6)
    query, weights = exact_queries(queries * len(lens), heads, seed=8)
    starts = ids([sum(lens[:request]) for request in range(len(lens))]).repeat_interleave(queries)
    kv_lens = (ids(lens).unsqueeze(1) - torch.arange(queries - 1, -1, -1, device="cuda")).clamp(min=0).flatten()
    expected = indexer_scores_fp8(
        query, weights, keys, kv_lens=kv_lens, key_starts=starts, columns=pages.capacity, impl="reference"
    )
    for dtype in (torch.int64, torch.int32):
        some = IndexKeys(pages.values, pages.scales, pages.block_tables.to(dtype))
        found = indexer_scores_fp8(query, weights, some, kv_lens=kv_lens.to(dtype), impl=impl)
        assert torch.equal(found, expected)
    wanted = indexer_topk_fp8(query, weights, keys, kv_lens=kv_lens, key_starts=starts, k=70, impl="reference")
    for workspace in (1 << 30, 1):
        found = indexer_topk_fp8(query, weights, pages, kv_lens=kv_lens, k=70, impl=impl, workspace_bytes=workspace)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("bad", [-1, 2147480000])
def test_pages_that_do_not_exist_read_as_zeros(impl: str, bad: int) -> None:
    pages = paged(exact_keys(256, seed=1), [256], 64, seed=2)
    pages.block_tables[0, 2] = bad
    query, weights = exact_queries(1, 32, seed=3)
    scores = indexer_scores_fp8(query, weights, pages, kv_lens=ids([256]), impl=impl)
    assert torch.equal(scores, indexer_scores_fp8(query, weights, pages, kv_lens=ids([256]), impl="reference"))
    assert not scores[0, 128:192].any()


@pytest.mark.parametrize("impl", KERNELS)
def test_random_values_are_close_to_fp64_and_the_fused_selection_is_that_of_the_scores(impl: str) -> None:
    rows, count, k = 66, 5000, 512
    query, query_scale = quantize_fp8(normal(rows, 32, 128, seed=1))
    keys = IndexKeys(*(x.squeeze(-1) if x.shape[-1] == 1 else x for x in quantize_fp8(normal(count, 128, seed=2))))
    weights = normal(rows, 32, seed=3) * query_scale.squeeze(-1)
    lens = torch.arange(count - rows, count, device="cuda") + 1
    scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens, impl=impl)
    products = torch.einsum("thd,sd->ths", query.double(), keys.values.double()).relu()
    exact = torch.einsum("th,ths->ts", weights.double(), products) * keys.scales.double()
    seen = torch.arange(count, device="cuda") < lens.unsqueeze(1)
    assert torch.equal(scores.isinf(), ~seen)
    error = (scores.double() - exact)[seen].norm() / exact[seen].norm()
    assert error < 5e-4  # the matrix units align FP8 products to about 14 bits
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    for workspace in (1 << 30, 1):
        positions, best = indexer_topk_fp8(
            query, weights, keys, kv_lens=lens, k=k, impl=impl, workspace_bytes=workspace
        )
        assert torch.equal(positions, order.indices[:, :k])
        assert torch.equal(best, order.values[:, :k])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("value", [0.0, 1.0, 1e30, math.inf, math.nan])
def test_extreme_weights_stay_visible_and_ties_go_to_the_first(impl: str, value: float) -> None:
    query, weights = exact_queries(5, 32, seed=1)
    weights[:] = value
    keys = IndexKeys(torch.ones(3000, 128, device="cuda").to(FP8), torch.ones(3000, device="cuda"))
    lens = ids([3000, 2999, 100, 1, 0])
    positions, scores = indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=128, impl=impl, workspace_bytes=1)
    wanted = torch.arange(128, device="cuda").expand(5, -1)
    assert torch.equal(positions, torch.where(wanted < lens.unsqueeze(1), wanted, -1))
    expected = indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=128, impl="reference")[1]
    assert torch.equal(scores.isnan(), expected.isnan())
    torch.testing.assert_close(scores, expected, equal_nan=True, rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", KERNELS)
def test_a_nan_key_is_seen_by_rows_that_reach_it_only(impl: str) -> None:
    keys = exact_keys(400, seed=1)
    keys.values.view(torch.uint8)[300] = 0x7F
    keys.scales[350] = math.nan
    query, weights = exact_queries(4, 32, seed=2)
    weights += 0.5
    lens = ids([300, 301, 351, 400])
    scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens, impl=impl)
    wanted = torch.zeros(4, 400, dtype=torch.bool, device="cuda")
    wanted[1:, 300] = True
    wanted[2:, 350] = True
    assert torch.equal(scores.isnan(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,dim", [(1, 16), (5, 40), (32, 128), (70, 64)])
def test_float_keys_of_any_shape(dtype: torch.dtype, heads: int, dim: int) -> None:
    query, keys = integers(9, heads, dim, seed=1).to(dtype), integers(700, dim, seed=2).to(dtype)
    weights = integers(9, heads, seed=3)
    assert choose_indexer_scores(query, keys).impl == "triton"
    expected = indexer_scores(query.float(), weights, keys.float(), impl="reference")
    assert torch.equal(indexer_scores(query, weights, keys), expected)
    starts, lens = ids([0] * 4 + [300] * 5), ids([297, 298, 299, 300, 396, 397, 398, 399, 400])
    given = {"key_starts": starts, "kv_lens": lens, "k": 33}
    wanted = indexer_topk(query.float(), weights, keys.float(), **given, impl="reference")
    for workspace in (1 << 30, 1):
        found = indexer_topk(query, weights, keys, **given, workspace_bytes=workspace)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


def hard_keys(kind: str, count: int) -> IndexKeys:
    """Keys whose scores are trying for a threshold from a sample."""
    keys = exact_keys(count, seed=2)
    if kind == "equal":
        keys.values.copy_(torch.ones(1, 128, device="cuda").to(FP8).expand(count, -1))
        keys.scales.fill_(1.0)
    elif kind == "rising":
        keys.scales.copy_(torch.arange(1, count + 1, device="cuda"))
    elif kind == "falling":
        keys.scales.copy_(torch.arange(count, 0, -1, device="cuda"))
    elif kind == "nan":
        keys.scales[::3] = math.nan
    elif kind == "last":
        keys.scales[:-3000] = 0.0
    elif kind == "minus inf":
        keys.scales[torch.rand(count, generator=generator(3), device="cuda") < 0.99] = math.inf
    return keys


@pytest.mark.parametrize("kind", ["ties", "equal", "rising", "falling", "nan", "last", "minus inf"])
def test_blocks_give_the_best_of_the_scores(kind: str) -> None:
    rows, count = 259, 70000
    query, weights = exact_queries(rows, 32, seed=1)
    weights = {"rising": weights.abs(), "falling": weights.abs(), "minus inf": -weights.abs()}.get(kind, weights)
    keys = hard_keys(kind, count)
    lens = torch.linspace(0, 60000, rows, device="cuda").long()
    lens[-150:] = 69980
    starts = torch.zeros_like(lens)
    starts[-75:] = 11
    scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens, key_starts=starts, impl="gluon")
    for k in (2048, 100):
        wanted = topk_select(scores, k, lengths=lens, impl="reference")
        given = {"kv_lens": lens, "key_starts": starts, "k": k, "impl": "gluon"}
        for workspace in (60 << 20, 5 << 20):
            found = indexer_topk_fp8(query, weights, keys, **given, workspace_bytes=workspace)
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1].nan_to_num(7.0), wanted[1].nan_to_num(7.0))
        some = indexer_topk_fp8(query, weights, keys, **given, workspace_bytes=60 << 20, sorted_by="none")[0]
        assert torch.equal(some.sort(1).values, wanted[0].sort(1).values)
        assert bool(((some >= 0).int().diff(dim=1) <= 0).all())


@pytest.mark.parametrize("rows", [257, 514])
def test_a_score_has_the_same_bits_whatever_is_scored_with_it(rows: int) -> None:
    """Rows are cut in blocks, and blocks in groups of four: none of it shows."""
    query, query_scale = quantize_fp8(normal(rows, 32, 128, seed=1))
    values, scales = quantize_fp8(normal(40000, 128, seed=2))
    keys, weights = IndexKeys(values, scales.squeeze(-1)), normal(rows, 32, seed=3) * query_scale.squeeze(-1)
    lens = torch.arange(40000 - rows, 40000, device="cuda") + 1
    scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens)
    for row in (0, rows - 1):
        alone = indexer_scores_fp8(query[row:][:1], weights[row:][:1], keys, kv_lens=lens[row:][:1])
        assert torch.equal(alone[0], scores[row])
    wanted = topk_select(scores, 2048, lengths=lens)
    for workspace in (320 << 20, 42 << 20, 1 << 20):  # few large blocks, many, chunks of a row
        found = indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=2048, workspace_bytes=workspace)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


def test_blocks_follow_the_current_stream_and_leave_memory_to_it() -> None:
    """Calls back to back on a stream of the caller's, each after its inputs changed there."""
    rows, count, k = 300, 60000, 512
    query, weights = exact_queries(rows, 32, seed=1)
    keys = exact_keys(count, seed=2)
    lens = torch.stack([torch.arange(count - rows, count, device="cuda"), torch.zeros(rows, device="cuda").long()], 1)
    others = [exact_queries(rows, 32, seed=seed)[0] for seed in (5, 6, 7)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    found = []
    with torch.cuda.stream(stream):
        for other in others:
            query.view(torch.uint8).copy_(other.view(torch.uint8))
            found.append(
                indexer_topk_fp8(
                    query, weights, keys, kv_lens=lens[:, 0], k=k, workspace_bytes=30 << 20, sorted_by="position"
                )
            )
            torch.full((8 << 20,), math.nan, device="cuda")
            query.view(torch.uint8).zero_()
    stream.synchronize()
    for other, (positions, best) in zip(others, found, strict=True):
        scores = indexer_scores_fp8(other, weights, keys, kv_lens=lens[:, 0])
        wanted = topk_select(scores, k, sorted_by="position", impl="reference")
        assert torch.equal(positions, wanted[0])
        assert torch.equal(best, wanted[1])


def test_many_rows_are_selected_in_blocks() -> None:
    rows = 4099
    query, weights = exact_queries(rows, 32, seed=1)
    keys = exact_keys(600, seed=2)
    lens = torch.arange(rows, device="cuda") % 601
    wanted = indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=16, impl="reference")
    found = indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=16, workspace_bytes=1 << 20)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_no_rows_and_no_keys() -> None:
    for rows, count in [(0, 10), (3, 0)]:
        query, weights = exact_queries(rows, 32, seed=1)
        lens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        positions, scores = indexer_topk_fp8(query, weights, exact_keys(count, seed=2), kv_lens=lens, k=4)
        assert positions.shape == scores.shape == (rows, 4)
        assert bool((positions == -1).all())
        assert indexer_scores_fp8(query, weights, exact_keys(count, seed=2), kv_lens=lens).shape == (rows, count)


def test_far_rows_of_a_large_pool_are_reached() -> None:
    """Byte offsets beyond 2^31."""
    page_bytes = 64 * FP8_INDEX.row_bytes
    pages = torch.zeros(2**31 // page_bytes + 9, page_bytes, dtype=torch.uint8, device="cuda")
    far = paged(exact_keys(128, seed=1), [128], 64, seed=2)
    pages[-2:, : 64 * 128] = far.values[far.block_tables[0]].view(torch.uint8)
    pages[-2:, 64 * 128 :] = far.scales[far.block_tables[0]].view(torch.uint8)
    keys = IndexKeys.from_pages(pages, ids([[len(pages) - 2, len(pages) - 1]]), page_size=64)
    query, weights = exact_queries(1, 32, seed=3)
    expected = indexer_scores_fp8(query, weights, exact_keys(128, seed=1), kv_lens=ids([128]), impl="reference")
    for impl in KERNELS:
        assert torch.equal(indexer_scores_fp8(query, weights, keys, kv_lens=ids([128]), impl=impl), expected)


@pytest.mark.parametrize("impl", KERNELS)
def test_capture_and_replay_with_other_contents(impl: str) -> None:
    pages = paged(exact_keys(1500, seed=1), [700, 800], 64, seed=2)
    query, weights = exact_queries(4, 32, seed=3)
    lens = ids([699, 700, 799, 800])

    def run() -> tuple[Tensor, Tensor, Tensor]:
        scores = indexer_scores_fp8(query, weights, pages, kv_lens=lens, impl=impl)
        return scores, *indexer_topk_fp8(query, weights, pages, kv_lens=lens, k=64, impl=impl)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    query.copy_(exact_queries(4, 32, seed=9)[0])
    lens.copy_(ids([5, 64, 0, 650]))
    graph.replay()
    scores = indexer_scores_fp8(query, weights, pages, kv_lens=lens, impl="reference")
    assert torch.equal(captured[0], scores)
    wanted = indexer_topk_fp8(query, weights, pages, kv_lens=lens, k=64, impl="reference")
    assert torch.equal(captured[1], wanted[0])
    assert torch.equal(captured[2], wanted[1])


def test_blocks_are_captured_with_their_streams() -> None:
    rows, count, k = 261, 50000, 2048
    query, weights = exact_queries(rows, 32, seed=1)
    keys = exact_keys(count, seed=2)
    lens = torch.arange(count - rows, count, device="cuda") + 1

    def run() -> tuple[Tensor, Tensor]:
        return indexer_topk_fp8(query, weights, keys, kv_lens=lens, k=k, workspace_bytes=30 << 20)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (8, 9):
        query.copy_(exact_queries(rows, 32, seed=seed)[0])
        lens -= 1000
        graph.replay()
        scores = indexer_scores_fp8(query, weights, keys, kv_lens=lens)
        wanted = topk_select(scores, k, lengths=lens, impl="reference")
        assert torch.equal(captured[0], wanted[0])
        assert torch.equal(captured[1], wanted[1])


def test_custom_ops_pass_opcheck() -> None:
    from cptools.kernels.indexer_topk import blocks_gluon, gluon, triton

    out, lens = torch.zeros(3, 200, device="cuda"), ids([1, 150, 200])
    floats = integers(3, 5, 64, seed=1), integers(3, 5, seed=2), integers(200, 64, seed=3)
    torch.library.opcheck(triton.scores_into, (out, *floats, None, None, None, lens, 0, 0))
    torch.library.opcheck(triton.fill_beyond, (out, lens, None, 200))
    positions, scores = ids([[0, 1], [3, -1], [2, 0]]), torch.zeros(3, 2, device="cuda")
    torch.library.opcheck(
        triton.carry_into, (positions.clone(), torch.zeros(3, 10, device="cuda"), positions, scores, positions, 64)
    )
    # opcheck compares what an op may not change by arithmetic, which FP8 does not have.
    keys = exact_keys(200, seed=1)
    problem = *exact_queries(3, 32, seed=2), keys.values, keys.scales
    torch.library.opcheck(
        gluon.scores_into,
        (out, *problem, None, None, lens, 0, 0),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    torch.library.opcheck(
        blocks_gluon.topk,
        (*problem, None, lens, 200, 10, 1 << 20, "score"),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
