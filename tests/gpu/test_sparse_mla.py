"""Sparse MLA kernels against the float32 reference, on the GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8_MLA
from cptools.kernels.sparse_mla import choose_sparse_mla, reference, sparse_mla

pytestmark = pytest.mark.gpu

SCALE = 256**-0.5
OUT_TOLERANCE = 4e-3  # weights and output rounded to bfloat16
LSE_TOLERANCE = 2e-5


@pytest.fixture(autouse=True, scope="module")
def exact_matmul() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def some_ids(tokens: int, columns: int, rows: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, rows, (tokens, columns), generator=generator, device="cuda", dtype=dtype)


def check(query: Tensor, rows: Tensor, ids: Tensor, *, impl: str, scale: float = SCALE, **options: object) -> Tensor:
    """Run, compare with the reference, and give the output back."""
    v_dim = min(512, rows.shape[1])
    out, lse = sparse_mla(query, rows, ids, scale=scale, v_dim=v_dim, impl=impl, **options)  # type: ignore[arg-type]
    want_out, want_lse = reference.sparse_mla(query, rows, ids, scale=scale, v_dim=v_dim)
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all()
    if (~empty).any():
        error = (out.double() - want_out.double()).norm() / want_out.double().norm()
        assert error < OUT_TOLERANCE, error
        gap = ((lse - want_lse)[~empty].abs() / want_lse[~empty].abs().clamp(min=1.0)).max()
        assert gap < LSE_TOLERANCE, gap
    return out


@functools.cache
def poisoned_rows(rows: int, seed: int = 1) -> Tensor:
    """Rows of which the odd ones are NaN: what unused rows hold must not matter."""
    filled = randn(rows, 576, seed=seed)
    filled[1::2] = torch.nan
    return filled


@pytest.mark.parametrize("impl", ["gluon", "triton"])
@pytest.mark.parametrize(
    "tokens, heads, columns",
    [
        (150, 64, 2048),
        (1, 64, 64),
        (7, 1, 128),
        (5, 16, 192),
        (9, 63, 320),
        (6, 65, 256),
        (3, 128, 2048),
        (4, 100, 70),
        (100, 128, 192),
    ],
)
def test_any_count_of_heads_and_columns(impl: str, tokens: int, heads: int, columns: int) -> None:
    query, rows = randn(tokens, heads, 576), randn(5000, 576, seed=1)
    out = check(query, rows, some_ids(tokens, columns, 5000), impl=impl, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("impl", ["gluon", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_without_row_are_ignored_anywhere(impl: str, dtype: torch.dtype) -> None:
    rows = poisoned_rows(4000)
    ids = some_ids(16, 512, 2000, dtype=dtype) * 2
    ids[0] = -1
    ids[1, 1:] = -1
    ids[2, :-1] = -1
    ids[3, :64] = -1
    ids[4, 64:128] = -1
    ids[5, :128] = -1
    ids[6, ::2] = -1
    ids[7, 100:] = 4000
    ids[8, ::3] = 2147480000
    ids[9] = 8
    ids[10] = 2147480000
    ids[11, 384:] = -2147480000
    if dtype == torch.int64:
        ids[12, ::5] = 2**32 + 2
        ids[13, ::7] = -(2**40)
    check(randn(16, 64, 576), rows, ids, impl=impl)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
@pytest.mark.parametrize("kind", ["equal", "dominating", "huge", "minus huge", "signs", "zero"])
def test_extreme_scores(impl: str, kind: str) -> None:
    query, rows = randn(12, 64, 576), randn(3000, 576, seed=1)
    ids = some_ids(12, 640, 3000)
    if kind == "equal":
        rows[:] = rows[0].clone()
    elif kind == "dominating":
        rows[int(ids[3, 333])] *= 64
    elif kind == "zero":
        query.zero_()
    else:
        # One query column and one row column carry scores of +-1e30; the values stay ordinary.
        query[:, :, 575] = 1e20
        rows[:, 575] = 1e11 if kind == "huge" else -1e11
        if kind == "signs":
            rows[::2, 575] = 1e11
    check(query, rows, ids, impl=impl)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_counts_cut_the_columns(impl: str) -> None:
    query, rows, ids = randn(9, 64, 576), randn(3000, 576, seed=1), some_ids(9, 512, 3000)
    counts = torch.tensor([0, 1, 63, 64, 65, 128, 129, 511, 512], device="cuda", dtype=torch.int32)
    cut = ids.masked_fill(torch.arange(512, device="cuda") >= counts[:, None], -1)
    want = check(query, rows, cut, impl=impl)
    out, lse = sparse_mla(query, rows, ids, scale=SCALE, v_dim=512, counts=counts, impl=impl)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-4)
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_rows_beyond_32_bit_offsets(impl: str) -> None:
    rows = torch.empty(3_800_000, 576, dtype=torch.bfloat16, device="cuda")
    rows[-1000:] = randn(1000, 576)
    ids = some_ids(4, 256, 1000) + 3_799_000
    packed, _ = sparse_mla(randn(4, 64, 576), rows, ids, scale=SCALE, v_dim=512, impl=impl)
    near, _ = sparse_mla(randn(4, 64, 576), rows[-1000:], ids - 3_799_000, scale=SCALE, v_dim=512, impl=impl)
    assert torch.equal(packed, near)
    check(randn(4, 64, 576), rows[-1000:], ids - 3_799_000, impl=impl)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_nothing_to_attend_to(impl: str) -> None:
    query = randn(3, 64, 576)
    for rows, ids in [
        (randn(10, 576), torch.empty(3, 0, dtype=torch.int32, device="cuda")),
        (randn(0, 576), some_ids(3, 64, 10)),
        (randn(10, 576), torch.full((3, 200), -1, device="cuda")),
    ]:
        out, lse = sparse_mla(query, rows, ids, scale=SCALE, v_dim=512, impl=impl)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    out, lse = sparse_mla(query[:0], randn(10, 576), some_ids(0, 64, 10), scale=SCALE, v_dim=512, impl=impl)
    assert out.shape == (0, 64, 512)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_strided_query_rows_and_ids(impl: str) -> None:
    query = randn(6, 70, 600)[:, 3:67, :576]
    rows, ids = randn(2000, 640, seed=1)[:, :576], some_ids(6, 400, 2000)[:, 7:391:2]
    check(query, rows, ids, impl=impl)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_a_query_does_not_see_the_others_of_the_batch(impl: str) -> None:
    query, rows, ids = randn(300, 64, 576), randn(4000, 576, seed=1), some_ids(300, 2048, 4000)
    out, lse = sparse_mla(query, rows, ids, scale=SCALE, v_dim=512, impl=impl)
    alone, alone_lse = sparse_mla(query[77:78], rows, ids[77:78], scale=SCALE, v_dim=512, impl=impl)
    assert torch.equal(out[77:78], alone)
    assert torch.equal(lse[77:78], alone_lse)


@pytest.mark.parametrize("dim, v_dim", [(576, 512), (24, 16), (100, 60), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_serves_other_widths_and_dtypes(dtype: torch.dtype, dim: int, v_dim: int) -> None:
    query, rows, ids = randn(5, 10, dim, dtype=dtype), randn(300, dim, seed=1, dtype=dtype), some_ids(5, 77, 300)
    out, lse = sparse_mla(query, rows, ids, scale=0.2, v_dim=v_dim, impl="triton")
    want, want_lse = reference.sparse_mla(query, rows, ids, scale=0.2, v_dim=v_dim)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, want_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_packed_rows(impl: str) -> None:
    latent, rope = randn(1000, 512, dtype=torch.float32), randn(1000, 64, seed=3, dtype=torch.float32)
    query, ids = randn(20, 64, 576), some_ids(20, 256, 1000)
    for row_format in (FP8_MLA, BF16_MLA):
        packed = row_format.pack(latent, rope)
        out, lse = sparse_mla(query, packed, ids, scale=SCALE, v_dim=512, row_format=row_format, impl=impl)
        want = reference.sparse_mla(query, row_format.unpack_joint(packed), ids, scale=SCALE, v_dim=512)
        assert ((out - want[0]).norm() / want[0].norm()) < OUT_TOLERANCE
        torch.testing.assert_close(lse, want[1], atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_graph_replay_reads_the_new_contents(impl: str) -> None:
    query, rows, ids = randn(8, 64, 576), randn(3000, 576, seed=1), some_ids(8, 256, 3000)
    run = lambda: sparse_mla(query, rows, ids, scale=SCALE, v_dim=512, impl=impl)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    query.copy_(randn(8, 64, 576, seed=5))
    ids.copy_(some_ids(8, 256, 3000, seed=5))
    ids[2] = -1
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    graph.replay()
    want = run()
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


def test_registered_ops() -> None:
    from cptools.kernels.sparse_mla.gluon import sparse_mla_gluon
    from cptools.kernels.sparse_mla.triton import sparse_mla_triton

    query, rows, ids = randn(4, 64, 576), randn(500, 576, seed=1), some_ids(4, 128, 500)
    counts = torch.full((4,), 100, device="cuda", dtype=torch.int32)
    torch.library.opcheck(sparse_mla_gluon, (query, rows, ids, counts, SCALE, torch.bfloat16))
    torch.library.opcheck(sparse_mla_triton, (query, rows, ids, None, SCALE, 512, torch.float32))


def test_auto_says_what_it_picked() -> None:
    query, rows, ids = randn(4, 64, 576), randn(500, 576), some_ids(4, 128, 500)
    assert choose_sparse_mla(query, rows, ids, scale=SCALE, v_dim=512).impl == "gluon"
    assert choose_sparse_mla(query.float(), rows, ids, scale=SCALE, v_dim=512).impl == "triton"
    assert choose_sparse_mla(query, rows, ids, scale=-SCALE, v_dim=512).impl == "triton"
    wide = randn(4, 2, 2000)
    choice = choose_sparse_mla(wide, randn(10, 2000), ids, scale=SCALE, v_dim=1000)
    assert choice.impl == "reference"
    assert choice.fallback_reason is not None
    with pytest.raises(ValueError, match="not bfloat16"):
        sparse_mla(query.float(), rows, ids, scale=SCALE, v_dim=512, impl="gluon")
