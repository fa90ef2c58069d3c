"""The k best keys of rows whose index rows lie in pages, against scores written out in float64."""

from __future__ import annotations

import pytest
import torch

from cptools.formats import FP8, IndexRows
from cptools.kernels.indexer_topk import indexer_scores
from cptools.kernels.kv_store import store_rows
from cptools.kernels.paged_topk import choose_paged_topk, paged_topk
from cptools.kernels.topk_select import topk_select

LENS = (0, 1, 63, 64, 65, 700)
HEADS, PAGE = 4, 16


def problem(dtype: torch.dtype, dim: int, per_request: int, seed: int = 0):
    """Pages full of NaN but for the keys of one sequence a request; tables longer than needed, -1 at the end."""
    generator = torch.Generator().manual_seed(seed)
    row_format = IndexRows(dim, dtype)
    blocks = [-(-n // PAGE) for n in LENS]
    order = torch.randperm(sum(blocks) + 3, generator=generator)
    pages = torch.full((len(order), PAGE * row_format.row_bytes), 0xFF, dtype=torch.uint8)
    tables = torch.full((len(LENS), max(blocks) + 2), -1)
    keys, first = [], 0
    for request, (length, count) in enumerate(zip(LENS, blocks, strict=True)):
        tables[request, :count] = order[first : first + count]
        first += count
        rows = row_format.pack(torch.randn(length, dim, generator=generator))
        keys.append(row_format.unpack(rows))
        at = torch.arange(length)
        slots = tables[request, at // PAGE] * PAGE + at % PAGE
        store_rows(pages, slots, rows, planes=row_format.planes, page_size=PAGE)
    rows = len(LENS) * per_request
    query = torch.randn(rows, HEADS, dim, generator=generator)
    weights = torch.randn(rows, HEADS, generator=generator)
    # Rows of verification see one key more each.
    lens = torch.tensor([max(n - per_request + 1 + i, 0) for n in LENS for i in range(per_request)])
    return row_format, pages, tables, keys, query, weights, lens


@pytest.mark.parametrize("per_request", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 24), (torch.bfloat16, 32), (FP8, 32), (FP8, 128), (FP8, 160)]
)
def test_best_keys_by_position(dtype: torch.dtype, dim: int, per_request: int) -> None:
    row_format, pages, tables, keys, query, weights, lens = problem(dtype, dim, per_request)
    k = 24
    positions, scores = paged_topk(
        query, weights, pages, tables, kv_lens=lens, k=k, row_format=row_format, page_size=PAGE
    )
    rounded = row_format.round_query(query)
    for row, seen in enumerate(lens.tolist()):
        own = keys[row // per_request][:seen].double()
        want = (torch.relu(rounded[row].double() @ own.T) * weights[row, :, None].double()).sum(0)
        count = min(k, seen)
        best = want.sort(descending=True, stable=True).indices[:count]  # all relus may be 0: ties
        assert positions[row, :count].tolist() == sorted(best.tolist())
        assert (positions[row, count:] == -1).all()
        assert (scores[row, count:] == -torch.inf).all()
        torch.testing.assert_close(scores[row, :count].double(), want[positions[row, :count]], atol=1e-4, rtol=1e-5)


def test_row_does_not_depend_on_the_others_nor_on_the_width_of_the_table() -> None:
    row_format, pages, tables, _, query, weights, lens = problem(FP8, 32, 1)
    sizes = {"k": 24, "row_format": row_format, "page_size": PAGE}
    want = paged_topk(query, weights, pages, tables, kv_lens=lens, **sizes)
    wide = torch.nn.functional.pad(tables, (0, 50), value=-1)
    for row in range(len(LENS)):
        one = slice(row, row + 1)
        got = paged_topk(query[one], weights[one], pages, wide[one], kv_lens=lens[one], **sizes)
        assert torch.equal(got[0], want[0][one])
        assert torch.equal(got[1], want[1][one])


def test_contexts_around_2048() -> None:
    """Field case D17: lengths at which kernels change over, in one batch and in pages of 64."""
    generator = torch.Generator().manual_seed(2)
    row_format, lens, k = IndexRows(32, FP8), torch.tensor([2047, 2048, 2049, 4096]), 256
    tables = torch.randperm(4 * 64, generator=generator).view(4, 64)
    rows = row_format.pack(torch.randn(4 * 4096, 32, generator=generator))
    pages = torch.zeros(256, 64 * row_format.row_bytes, dtype=torch.uint8)
    slots = (tables.unsqueeze(2) * 64 + torch.arange(64)).flatten()
    store_rows(pages, slots, rows, planes=row_format.planes, page_size=64)
    query, weights = torch.randn(4, 16, 32, generator=generator), torch.randn(4, 16, generator=generator)
    positions, _ = paged_topk(query, weights, pages, tables, kv_lens=lens, k=k, row_format=row_format, page_size=64)
    keys, rounded = row_format.unpack(rows).view(4, 4096, 32), row_format.round_query(query)
    for row, seen in enumerate(lens.tolist()):
        scores = indexer_scores(rounded[row : row + 1], weights[row : row + 1], keys[row, :seen])
        want, _ = topk_select(scores, k, sorted_by="position")
        assert torch.equal(positions[row : row + 1], want)


def test_no_rows_no_pages_no_keys() -> None:
    row_format = IndexRows(32, FP8)
    sizes = {"k": 3, "row_format": row_format, "page_size": PAGE}
    for rows, pages, blocks in ((0, 4, 2), (2, 0, 0), (2, 4, 0)):
        positions, scores = paged_topk(
            torch.randn(rows, HEADS, 32),
            torch.randn(rows, HEADS),
            torch.zeros(pages, PAGE * row_format.row_bytes, dtype=torch.uint8),
            torch.full((rows, blocks), -1),
            kv_lens=torch.zeros(rows, dtype=torch.int64),
            **sizes,
        )
        assert positions.tolist() == [[-1] * 3] * rows
        assert (scores == -torch.inf).all()


def test_misfits_are_refused() -> None:
    row_format, pages, tables, _, query, weights, lens = problem(FP8, 32, 1)
    sizes = {"k": 3, "row_format": row_format, "page_size": PAGE}
    with pytest.raises(ValueError, match=r"want float query \[T, H, 32\]"):
        paged_topk(query[:, :, :31], weights, pages, tables, kv_lens=lens, **sizes)
    with pytest.raises(ValueError, match=r"pages must be uint8 \[any, 576\], got uint8 \[\d+, 575\]"):
        paged_topk(query, weights, pages[:, 1:], tables, kv_lens=lens, **sizes)
    with pytest.raises(ValueError, match="6 rows need"):
        paged_topk(query, weights, pages, tables[:4], kv_lens=lens, **sizes)
    choice = choose_paged_topk(query, pages, tables, row_format=row_format, page_size=PAGE)
    assert choice.impl == "reference"
    assert "tensors are on cpu" in str(choice.fallback_reason)
