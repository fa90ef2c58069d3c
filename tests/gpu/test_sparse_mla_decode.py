"""Sparse MLA decode on a GPU against fp64 over the unpacked rows: holes, poison, extremes, odd sizes, graphs."""

import math

import pytest
import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8_MLA, MlaRows
from cptools.kernels.sparse_mla.decode import choose_sparse_mla_decode, sparse_mla_decode

pytestmark = pytest.mark.gpu

SCALE = 256**-0.5
PAGE = 64
FORMATS = {"fp8": FP8_MLA, "bf16": BF16_MLA}
SERVED = [("triton", "fp8"), ("triton", "bf16"), ("gluon", "fp8")]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def random_pool(row_format: MlaRows, rows: int, seed: int) -> Tensor:
    packed = row_format.pack(normal(rows, 512, seed=seed), normal(rows, 64, seed=seed + 1))
    return packed.view(rows // PAGE, PAGE * row_format.row_bytes)


def poison_unused(pool: Tensor, row_format: MlaRows, slots: Tensor) -> Tensor:
    """Every row that no slot names is NaN in whatever way its bytes are read."""
    rows = torch.full_like(pool, 0xFF).view(-1, row_format.row_bytes)
    used = slots[(slots >= 0) & (slots < rows.shape[0])].long()
    rows[used] = pool.view(-1, row_format.row_bytes)[used]
    return rows.view_as(pool)


def random_slots(tokens: int, columns: int, rows: int, seed: int, *, holes: float = 0.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    slots = torch.randint(1, rows, (tokens, columns), generator=generator, device="cuda", dtype=torch.int32)
    return slots.masked_fill(torch.rand(slots.shape, generator=generator, device="cuda") < holes, -1)


def attention(
    query: Tensor, pool: Tensor, slots: Tensor, row_format: MlaRows, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp64, a query at a time."""
    rows = pool.view(-1, row_format.row_bytes)
    out = torch.zeros(*query.shape[:2], 512, dtype=torch.float64, device="cuda")
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64, device="cuda")
    for t in range(query.shape[0]):
        mine = slots[t].long() if counts is None else slots[t, : max(int(counts[t]), 0)].long()
        mine = mine[(mine >= 0) & (mine < rows.shape[0])]
        if mine.numel():
            keys = row_format.unpack_joint(rows[mine]).double()
            scores = query[t].double() @ keys.T * SCALE
            lse[t] = torch.logsumexp(scores, 1)
            out[t] = torch.softmax(scores, 1) @ keys[:, :512]
    return out, lse


def assert_attends(
    impl: str,
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    row_format: MlaRows,
    *,
    counts: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    clean: Tensor | None = None,
    tolerance: float = 6e-3,
) -> None:
    """Rows with nothing valid exactly; the others by norm, each query for itself."""
    out, lse = sparse_mla_decode(
        query, pool, slots, row_format=row_format, scale=SCALE, counts=counts, out_dtype=out_dtype, impl=impl
    )
    assert out.dtype == out_dtype
    assert out.shape == (*query.shape[:2], 512)
    expected, expected_lse = attention(query, pool if clean is None else clean, slots, row_format, counts)
    empty = torch.isneginf(expected_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert not out[empty].any()
    gap = (out.double() - expected).flatten(1).norm(dim=1)
    assert bool((gap <= tolerance * expected.flatten(1).norm(dim=1)).all()), gap
    torch.testing.assert_close(lse.double()[~empty], expected_lse[~empty], rtol=2e-6, atol=2e-4)


@pytest.mark.parametrize("impl, rows", SERVED)
@pytest.mark.parametrize("tokens, heads, columns", [(1, 64, 2048), (3, 64, 2048), (40, 64, 512), (150, 64, 256)])
def test_random(impl: str, rows: str, tokens: int, heads: int, columns: int) -> None:
    row_format = FORMATS[rows]
    pool, query = random_pool(row_format, 6400, 1), normal(tokens, heads, 576, seed=3).bfloat16()
    assert_attends(impl, query, pool, random_slots(tokens, columns, 6400, 4), row_format)


@pytest.mark.parametrize("impl, rows", SERVED)
@pytest.mark.parametrize("heads", [1, 16, 48, 65, 128])
@pytest.mark.parametrize("columns", [64, 192, 2048 + 64])
def test_heads_and_columns_that_fill_no_tile(impl: str, rows: str, heads: int, columns: int) -> None:
    row_format = FORMATS[rows]
    pool, query = random_pool(row_format, 6400, 1), normal(2, heads, 576, seed=3).bfloat16()
    slots = random_slots(2, columns, 6400, 4, holes=0.2).long()
    assert_attends(impl, query, pool, slots, row_format, out_dtype=torch.float32)


@pytest.mark.parametrize("impl, rows", SERVED)
@pytest.mark.parametrize("tokens", [8, 70, 140])
def test_holes_anywhere_and_poisoned_unused_rows(impl: str, rows: str, tokens: int) -> None:
    row_format = FORMATS[rows]
    slots = random_slots(tokens, 2048, 6400, 5, holes=0.3)
    slots[0, 1:] = -1  # one row
    slots[1] = -1  # none
    slots[2, :64] = -1  # the first block empty
    slots[3, 64:128] = -1
    slots[4, 100:] = -1  # a tail
    slots[5, ::3] = 6400  # just beyond the end
    slots[6, ::2] = 2147480000
    slots[7] = slots[7, 0].clamp(min=1)  # duplicates
    clean = random_pool(row_format, 6400, 1)
    pool = poison_unused(clean, row_format, slots)
    query = normal(tokens, 64, 576, seed=6).bfloat16()
    assert_attends(impl, query, pool, slots, row_format, clean=clean)


@pytest.mark.parametrize("impl, rows", SERVED)
def test_counts(impl: str, rows: str) -> None:
    row_format = FORMATS[rows]
    counts = torch.tensor([0, 1, 63, 64, 65, 128, 129, 2047, 2048, 5000, -3, 700], device="cuda")
    slots = random_slots(12, 2048, 6400, 7, holes=0.1)
    slots[torch.arange(2048, device="cuda") >= counts[:, None]] = 0  # row 0 is poisoned
    pool = random_pool(row_format, 6400, 1)
    pool.view(-1, row_format.row_bytes)[0] = 0xFF
    query = normal(12, 64, 576, seed=6).bfloat16()
    for integers in (torch.int32, torch.int64):
        assert_attends(impl, query, pool, slots, row_format, counts=counts.to(integers))


@pytest.mark.parametrize("impl, rows", SERVED)
@pytest.mark.parametrize("tokens", [2, 66])
def test_extreme_scores(impl: str, rows: str, tokens: int) -> None:
    row_format = FORMATS[rows]
    latent, rope = normal(6400, 512, seed=1), normal(6400, 64, seed=2)
    query = normal(tokens, 64, 576, seed=3).bfloat16()
    slots = random_slots(tokens, 2048, 6400, 4)
    equal = row_format.pack(latent[:1].expand(6400, -1), rope[:1].expand(6400, -1))
    assert_attends(impl, query, equal, slots, row_format)
    dominated = latent.clone()
    dominated[slots[:, 77].long()] *= 40
    assert_attends(impl, query, row_format.pack(dominated, rope), slots, row_format)
    # Scores of about 1e30 of both signs: one key takes all, or the keys with that very score share it.
    huge = torch.zeros_like(query)
    huge[..., 0] = 1e30
    assert_attends(impl, huge, row_format.pack(latent, rope), slots, row_format)
    assert_attends(impl, -huge, row_format.pack(latent, rope), slots, row_format)


@pytest.mark.parametrize("impl, rows", SERVED)
def test_a_nan_stays_visible(impl: str, rows: str) -> None:
    row_format = FORMATS[rows]
    pool, slots = random_pool(row_format, 640, 1), random_slots(2, 128, 640, 4)
    query = normal(2, 64, 576, seed=3).bfloat16()
    query[1, 5] = math.nan
    out, lse = sparse_mla_decode(query, pool, slots, row_format=row_format, scale=SCALE, impl=impl)
    assert torch.isnan(out).all(-1).sum() == torch.isnan(lse).sum() == 1
    assert torch.isnan(lse[1, 5])


@pytest.mark.parametrize("impl", sorted({impl for impl, _ in SERVED}))
def test_rows_beyond_2_31_bytes(impl: str) -> None:
    count = 3_700_000 // PAGE * PAGE
    pool = torch.empty(count // PAGE, PAGE * 656, dtype=torch.uint8, device="cuda").fill_(0xFF)
    slots = random_slots(2, 256, count, 4).long()
    slots[:, ::2] = count - 1 - slots[:, ::2] % 1000
    rows = pool.view(-1, 656)
    rows[slots.flatten()] = FP8_MLA.pack(normal(512, 512, seed=1), normal(512, 64, seed=2))
    assert_attends(impl, normal(2, 64, 576, seed=3).bfloat16(), pool, slots, FP8_MLA)


@pytest.mark.parametrize("impl, rows", SERVED)
@pytest.mark.parametrize("tokens", [1, 100])
def test_graph_replays_with_changed_contents(impl: str, rows: str, tokens: int) -> None:
    row_format = FORMATS[rows]
    pool, query = random_pool(row_format, 6400, 1), normal(tokens, 64, 576, seed=3).bfloat16()
    slots = random_slots(tokens, 512, 6400, 4)

    def attend(name: str) -> tuple[Tensor, Tensor]:
        return sparse_mla_decode(
            query, pool, slots, row_format=row_format, scale=SCALE, out_dtype=torch.bfloat16, impl=name
        )

    attend(impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(impl)
    for seed in (10, 20):
        query.copy_(normal(tokens, 64, 576, seed=seed))
        pool.copy_(random_pool(row_format, 6400, seed + 1))
        slots.copy_(random_slots(tokens, 512, 6400, seed + 2, holes=0.5))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        expected, expected_lse = attend(impl)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        reference, _ = attend("reference")
        assert (out.float() - reference.float()).norm() < 6e-3 * reference.float().norm()


def test_many_runs_give_the_same_bits() -> None:
    """A race would show as a difference now and then."""
    pool = random_pool(FP8_MLA, 64_000, 1)
    for tokens in (1, 16, 130):
        query, slots = normal(tokens, 64, 576, seed=3).bfloat16(), random_slots(tokens, 2048, 64_000, 4, holes=0.1)
        for impl in sorted({impl for impl, _ in SERVED}):
            first, first_lse = sparse_mla_decode(query, pool, slots, row_format=FP8_MLA, scale=SCALE, impl=impl)
            for _ in range(30):
                out, lse = sparse_mla_decode(query, pool, slots, row_format=FP8_MLA, scale=SCALE, impl=impl)
                assert torch.equal(out, first)
                assert torch.equal(lse, first_lse)


def test_ops_are_registered_as_torch_wants_them() -> None:
    from cptools.kernels.sparse_mla.decode_gluon import sparse_mla_decode_gluon
    from cptools.kernels.sparse_mla.decode_triton import sparse_mla_decode_triton

    pool, slots = random_pool(FP8_MLA, 640, 1).view(-1, 656), random_slots(2, 128, 640, 4)
    query = normal(2, 64, 576, seed=3).bfloat16()
    args = (query, pool, slots, None, SCALE, True, 2, torch.bfloat16)
    torch.library.opcheck(sparse_mla_decode_triton, args)
    torch.library.opcheck(sparse_mla_decode_gluon, (query, pool, slots, None, SCALE, 1, torch.bfloat16))


def test_what_would_run() -> None:
    pool, query = random_pool(FP8_MLA, 640, 1), normal(2, 64, 576, seed=3).bfloat16()
    slots = random_slots(2, 128, 640, 4)
    assert choose_sparse_mla_decode(query, pool, slots, row_format=FP8_MLA).impl == "triton"
    many, their_slots = query.repeat(4, 1, 1), slots.repeat(4, 1)
    assert choose_sparse_mla_decode(many, pool, their_slots, row_format=FP8_MLA).impl == "gluon"
    bf16 = choose_sparse_mla_decode(many, random_pool(BF16_MLA, 640, 1), their_slots, row_format=BF16_MLA)
    assert bf16.impl == "triton"
    choice = choose_sparse_mla_decode(query.float(), pool, slots, row_format=FP8_MLA)
    assert choice.impl == "reference"
    assert "float32" in str(choice.fallback_reason)
