"""FP8 index keys on the CPU: their views, and that scores and selection are those of the values they stand for."""

import math
import re

import pytest
import torch
from torch import Tensor

from cptools.formats import FP8, FP8_INDEX, IndexRows, quantize_fp8
from cptools.kernels.indexer_topk import (
    IndexKeys,
    choose_indexer_scores,
    indexer_scores,
    indexer_scores_fp8,
    indexer_topk,
    indexer_topk_fp8,
)
from cptools.kernels.indexer_topk.chunks import chunk_shape, topk_of_chunks
from cptools.kernels.topk_select import topk_select


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(rows: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query e4m3, weights with its scale folded in, the float query that they stand for, float keys."""
    query, scale = quantize_fp8(normal(rows, 4, 128, seed=1))
    weights = normal(rows, 4, seed=2) * scale.squeeze(-1)
    return query, weights, query.float(), normal(count, 128, seed=3)


def test_scores_and_selection_are_those_of_the_dequantised_values() -> None:
    query, weights, wide, keys = problem(6, 700)
    rows = FP8_INDEX.pack(keys)
    starts, lens = torch.tensor([0, 0, 0, 300, 300, 690]), torch.tensor([1, 299, 300, 0, 400, 10])
    fp8 = IndexKeys.from_rows(rows)
    assert (fp8.page_size, fp8.dim, fp8.capacity) == (0, 128, 700)
    everything = indexer_scores(wide, weights, FP8_INDEX.unpack(rows))
    scores = indexer_scores_fp8(query, weights, fp8, kv_lens=lens, key_starts=starts)
    assert scores.shape == (6, 700)
    for t in range(6):
        assert torch.equal(scores[t, : lens[t]], everything[t, starts[t] : starts[t] + lens[t]])
        assert bool((scores[t, lens[t] :] == -math.inf).all())
    found = indexer_topk_fp8(query, weights, fp8, kv_lens=lens, key_starts=starts, k=50)
    wanted = indexer_topk(wide, weights, FP8_INDEX.unpack(rows), key_starts=starts, kv_lens=lens, k=50)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_hold_what_their_tables_say(page_size: int) -> None:
    query, weights, _, keys = problem(4, 130)
    rows = FP8_INDEX.pack(keys)
    lens, blocks = torch.tensor([69, 70, 59, 60]), -(-70 // page_size)
    order = torch.randperm(2 * blocks + 1, generator=torch.Generator().manual_seed(5))
    tables = order[: 2 * blocks].view(2, blocks)
    pages = torch.full((2 * blocks + 1, page_size * 132), 0x7F, dtype=torch.uint8)
    for request, part in enumerate((rows[:70], rows[70:])):
        for position, row in enumerate(part):
            page, at = pages[tables[request, position // page_size]], position % page_size
            page[at * 128 : (at + 1) * 128] = row[:128]
            page[page_size * 128 + at * 4 :][:4] = row[128:]
    in_pages = IndexKeys.from_pages(pages, tables, page_size=page_size)
    assert (in_pages.page_size, in_pages.dim, in_pages.capacity) == (page_size, 128, blocks * page_size)
    starts = torch.tensor([0, 0, 70, 70])
    together = IndexKeys.from_rows(rows)
    expected = indexer_scores_fp8(query, weights, together, kv_lens=lens, key_starts=starts, columns=80)
    assert torch.equal(indexer_scores_fp8(query, weights, in_pages, kv_lens=lens, columns=80), expected)
    found = indexer_topk_fp8(query, weights, in_pages, kv_lens=lens, k=33)
    wanted = indexer_topk_fp8(query, weights, together, kv_lens=lens, key_starts=starts, k=33)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_page_that_does_not_exist_reads_as_zeros_and_none_beyond_a_row_is_read() -> None:
    query, weights, _, keys = problem(2, 32)
    pages = torch.cat([FP8_INDEX.pack(keys)[:, :128].reshape(2, -1), FP8_INDEX.pack(keys)[:, 128:].reshape(2, -1)], 1)
    for bad in (-1, 2147480000):
        some = IndexKeys.from_pages(pages, torch.tensor([[1, bad], [bad, 0]]), page_size=16)
        scores = indexer_scores_fp8(query, weights, some, kv_lens=torch.tensor([16, 32]))
        assert not scores[1, :16].any()
        assert bool((scores[0, 16:] == -math.inf).all())


def test_no_rows_no_keys_and_no_pages() -> None:
    for rows, count in ((0, 8), (3, 0)):
        query, weights, _, keys = problem(rows, count)
        fp8, lens = IndexKeys.from_rows(FP8_INDEX.pack(keys)), torch.zeros(rows, dtype=torch.int64)
        assert indexer_scores_fp8(query, weights, fp8, kv_lens=lens).shape == (rows, count)
        positions, scores = indexer_topk_fp8(query, weights, fp8, kv_lens=lens, k=2)
        assert positions.tolist() == [[-1, -1]] * rows
        assert scores.tolist() == [[-math.inf, -math.inf]] * rows


def test_the_cpu_takes_the_reference_and_says_why() -> None:
    query, weights, wide, keys = problem(2, 8)
    fp8 = IndexKeys.from_rows(FP8_INDEX.pack(keys))
    choice = choose_indexer_scores(query, fp8)
    assert choice.impl == "reference"
    assert choice.fallback_reason is not None
    assert "tensors are on cpu" in choice.fallback_reason
    assert "not FP8" in str(choose_indexer_scores(wide, keys).fallback_reason)
    with pytest.raises(ValueError, match="tensors are on cpu"):
        indexer_scores(wide, weights, keys, impl="triton")
    with pytest.raises(ValueError, match="not one of auto, reference, gluon, triton"):
        indexer_topk_fp8(query, weights, fp8, kv_lens=torch.tensor([8, 8]), k=1, impl="cuda")


def test_wrong_arguments_raise_with_the_numbers() -> None:
    query, weights, wide, keys = problem(2, 64)
    rows = FP8_INDEX.pack(keys)
    fp8, lens = IndexKeys.from_rows(rows), torch.tensor([64, 64])
    with pytest.raises(ValueError, match=re.escape("got torch.float32 (2, 4, 128)")):
        indexer_scores_fp8(wide, weights, fp8, kv_lens=lens)
    with pytest.raises(ValueError, match=re.escape("(2, 3)")):
        indexer_topk_fp8(query, weights[:, :3], fp8, kv_lens=lens, k=1)
    with pytest.raises(ValueError, match=re.escape("kv_lens must be int64 or int32 [2], got int64 [1]")):
        indexer_topk_fp8(query, weights, fp8, kv_lens=lens[:1], k=1)
    with pytest.raises(ValueError, match="sorted_by must be 'score', 'position' or 'none', got 'best'"):
        indexer_topk_fp8(query, weights, fp8, kv_lens=lens, k=1, sorted_by="best")  # type: ignore[arg-type]
    pages = IndexKeys.from_pages(rows.view(4, -1), torch.zeros(3, 1, dtype=torch.int64), page_size=16)
    with pytest.raises(ValueError, match="2 rows can not be shared evenly by 3 block tables"):
        indexer_scores_fp8(query, weights, pages, kv_lens=lens)
    with pytest.raises(ValueError, match="key_starts have no meaning"):
        indexer_scores_fp8(query[:0], weights[:0], pages, kv_lens=lens[:0], key_starts=lens[:0])
    for values, scales in (
        (keys, torch.ones(64)),
        (fp8.values, torch.ones(63)),
        (fp8.values, torch.ones(64, 1)),
        (torch.zeros(64, 129).to(FP8), torch.ones(64)),
    ):
        with pytest.raises(ValueError, match="IndexKeys"):
            IndexKeys(values, scales)
    with pytest.raises(ValueError, match=re.escape("page_size=13")):
        IndexKeys.from_pages(rows.view(4, -1), lens.view(1, 2), page_size=13)
    assert IndexKeys.from_rows(IndexRows(40, FP8).pack(keys[:, :40])).dim == 40


@pytest.mark.parametrize("rows,columns,k", [(1, 100, 7), (5, 1000, 64), (64, 4096, 100)])
@pytest.mark.parametrize("workspace", [1, 5000, 100_000, 10_000_000])
def test_a_chunk_fits_the_workspace_where_candidates_do(rows: int, columns: int, k: int, workspace: int) -> None:
    block, width = chunk_shape(rows, columns, k, workspace)
    assert 1 <= block <= rows
    assert width % 64 == 0
    assert width >= min(k, columns)
    if width < columns:
        assert block == 1
    if workspace >= 8 * (k + 64):
        assert 4 * block * (k + width if width < columns else width) <= workspace


def test_rows_that_fit_are_scored_whole_in_as_many_blocks_as_it_takes() -> None:
    scores = normal(9, 300, seed=1)
    lens = torch.tensor([300, 0, 5, 299, 1000, 64, 65, 128, 1])
    seen = []

    def score(out: Tensor, part: slice, first: int) -> None:
        seen.append((part, first))
        out.copy_(scores[part, first : first + out.shape[1]])

    for workspace in (1 << 20, 4 * 4 * 330, 4 * 330):
        found = topk_of_chunks(score, lens, columns=300, k=10, workspace_bytes=workspace)
        wanted = topk_select(scores, 10, lengths=lens)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert {(part.stop - part.start) for part, _ in seen} == {9, 4, 1}
