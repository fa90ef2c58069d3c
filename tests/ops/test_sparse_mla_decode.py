"""The decode op on the CPU: the reference over packed rows, what it refuses, and how columns are split."""

import math

import pytest
import torch

from cptools.formats import BF16_MLA, FP8, FP8_MLA, MlaRows
from cptools.kernels.sparse_mla import sparse_mla
from cptools.kernels.sparse_mla.decode import choose_sparse_mla_decode, plan_parts, sparse_mla_decode


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("row_format", [FP8_MLA, BF16_MLA, MlaRows(20, 4, FP8), MlaRows(20, 4, torch.float32)], ids=str)
def test_equals_sparse_mla_over_the_unpacked_pool(row_format: MlaRows) -> None:
    rows, tokens = 96, 19
    dim = row_format.latent + row_format.rope
    joint = normal(rows, dim, seed=0)
    packed = row_format.pack(joint[:, : row_format.latent], joint[:, row_format.latent :])
    slots = torch.randint(-2, rows + 9, (tokens, 64), generator=torch.Generator().manual_seed(1))
    slots[0, 3] = 2147480000
    slots[1] = -1
    slots[2] = 5
    counts = torch.randint(-1, 80, (tokens,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    counts[2] = 64
    query = normal(tokens, 3, dim, seed=3)
    ids = slots.masked_fill(torch.arange(64) >= counts[:, None], -1)
    expected, expected_lse = sparse_mla(query, row_format.unpack_joint(packed), ids, scale=0.3, v_dim=row_format.latent)
    pool = packed.view(rows // 32, 32 * row_format.row_bytes)
    out, lse = sparse_mla_decode(query, pool, slots, row_format=row_format, scale=0.3, counts=counts)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert not out[1].any()
    assert bool((lse[1] == -math.inf).all())
    narrow, _ = sparse_mla_decode(
        query, pool, slots.int(), row_format=row_format, scale=0.3, counts=counts.long(), out_dtype=torch.bfloat16
    )
    assert torch.equal(narrow, expected.bfloat16())


def test_unused_rows_never_matter_and_nothing_at_all_is_legal() -> None:
    pool = FP8_MLA.pack(normal(8, 512, seed=0), normal(8, 64, seed=1))
    pool[4:] = 0xFF
    query = normal(2, 4, 576, seed=2).bfloat16()
    out, lse = sparse_mla_decode(query, pool, torch.tensor([[3, -1], [0, 9]]), row_format=FP8_MLA, scale=0.1)
    assert out.dtype == torch.float32
    assert bool(torch.isfinite(out).all() & torch.isfinite(lse).all())
    out, lse = sparse_mla_decode(query[:0], pool, torch.zeros(0, 64).int(), row_format=FP8_MLA, scale=0.1)
    assert out.shape == (0, 4, 512)
    assert lse.shape == (0, 4)
    out, lse = sparse_mla_decode(query, pool[:0], torch.zeros(2, 64).int(), row_format=FP8_MLA, scale=0.1)
    assert not out.any()
    assert bool((lse == -math.inf).all())


def test_what_does_not_fit_is_refused() -> None:
    pool, query = torch.zeros(4, 656, dtype=torch.uint8), torch.zeros(2, 4, 576)
    slots = torch.zeros(2, 64, dtype=torch.int32)
    good = {"row_format": FP8_MLA, "scale": 0.1}
    with pytest.raises(ValueError, match="query must be"):
        sparse_mla_decode(query[..., :512], pool, slots, **good)
    with pytest.raises(ValueError, match="pool must be"):
        sparse_mla_decode(query, pool[:, :655], slots, **good)
    with pytest.raises(ValueError, match="pool must be"):
        sparse_mla_decode(query, pool[::2], slots, **good)
    with pytest.raises(ValueError, match="slots must be"):
        sparse_mla_decode(query, pool, slots[:1], **good)
    with pytest.raises(ValueError, match="counts must be"):
        sparse_mla_decode(query, pool, slots, counts=torch.zeros(3, dtype=torch.int32), **good)
    with pytest.raises(ValueError, match="out_dtype"):
        sparse_mla_decode(query, pool, slots, out_dtype=torch.float16, **good)
    with pytest.raises(ValueError, match="scale"):
        sparse_mla_decode(query, pool, slots, row_format=FP8_MLA, scale=0.0)
    with pytest.raises(ValueError, match=r"does not serve.*cpu"):
        sparse_mla_decode(query, pool, slots, impl="gluon", **good)
    choice = choose_sparse_mla_decode(query, pool, slots, row_format=FP8_MLA)
    assert choice.impl == "reference"
    assert "cpu" in str(choice.fallback_reason)


@pytest.mark.parametrize("unit, unit_us, fixed_us", [(32, 3.5, 4.0), (128, 6.7, 5.0)])
def test_parts_cover_the_columns_and_fill_the_chip(unit: int, unit_us: float, fixed_us: float) -> None:
    for columns in (64, 2048, 2112):
        for programs in range(1, 400):
            parts = plan_parts(programs, columns, unit=unit, unit_us=unit_us, fixed_us=fixed_us)
            assert parts <= 8 or parts % 8 == 0
            assert parts <= -(-columns // unit)
    assert plan_parts(128, 2048, unit=128, unit_us=6.7, fixed_us=5.0) == 1
    assert plan_parts(16, 2048, unit=128, unit_us=6.7, fixed_us=5.0) == 8
    assert plan_parts(1, 2048, unit=32, unit_us=3.5, fixed_us=4.0) == 64
