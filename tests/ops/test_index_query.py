"""Indexer queries in FP8 stand for the rounded float query, scales folded into the weights."""

from __future__ import annotations

import pytest
import torch

from cptools.formats import FP8, FP8_MAX, IndexRows
from cptools.kernels.index_query import choose_fp8_query, fp8_query, rotated_query
from cptools.kernels.rowwise import RopeAngles

HEADS = 4


@pytest.mark.parametrize("dim", [1, 32, 127, 128])
def test_folded_scales_score_bit_for_bit(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, HEADS, dim, generator=generator) * torch.tensor([1e-3, 1, 1e30, 0])[:, None]
    weights = torch.randn(5, HEADS, generator=generator)
    values, scaled = fp8_query(query, weights)
    assert values.dtype == FP8
    assert torch.equal(values.float() * (scaled / weights).unsqueeze(2), IndexRows(dim, FP8).round_query(query))
    assert values.float().abs().amax() <= FP8_MAX


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_pairs_are_rotated_before(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(6, HEADS, 48, generator=generator).to(dtype)
    weights = torch.rand(6, HEADS, generator=generator) + 0.5
    angles = RopeAngles.at(torch.tensor([0, 1, 2, 63, 1000, 4095]), 16, 1e4)
    turned = rotated_query(query, angles)
    assert torch.equal(turned[0], query[0].float())
    assert torch.equal(turned[:, :, 16:], query[:, :, 16:].float())
    pairs = torch.view_as_complex(query[:, :, :16].double().unflatten(2, (8, 2)))
    spun = (
        pairs
        * torch.polar(torch.ones(6, 8, dtype=torch.float64), torch.atan2(angles.sin, angles.cos).double())[:, None]
    )
    want = torch.view_as_real(spun).flatten(2).float()
    torch.testing.assert_close(turned[:, :, :16], want, atol=2e-6 if dtype == torch.float32 else 0.03, rtol=0)
    for ours, theirs in zip(fp8_query(query, weights, angles), fp8_query(turned, weights), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def test_misfits_are_refused() -> None:
    query, weights = torch.zeros(3, HEADS, 32), torch.zeros(3, HEADS)
    angles = RopeAngles.at(torch.arange(3), 16, 1e4)
    for arguments, message in (
        ((query[:, :, 0], weights), r"got float32 \[3, 4\]"),
        ((query, weights[:2]), r"weights must be .* \[3, 4\], got float32 \[2, 4\]"),
        ((torch.zeros(3, HEADS, 129), weights), r"D <= 128\], got \[3, 4, 129\]"),
        ((query, weights, angles[slice(0, 2)]), r"cos must be .* \[3, any\], got float32 \[2, 8\]"),
        ((query[:, :, :8], weights, angles), r"angles \[3, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_query(*arguments)
    assert choose_fp8_query(query, weights).fallback_reason == "triton: tensors are on cpu"
