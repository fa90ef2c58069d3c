"""RMS norm, rotation and the indexer's queries on the GPU against their references there."""

from __future__ import annotations

import pytest
import torch

from cptools.kernels.index_query import choose_fp8_query, fp8_query
from cptools.kernels.rowwise import (
    RopeAngles,
    choose_rms_norm,
    choose_rope_interleaved,
    head_linear,
    linear_in_fp32,
    rms_norm,
    rope_interleaved,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    for rows, width in ((0, 64), (1, 6144), (3, 1), (5, 1000), (130, 2048), (2, 16384)):
        wide = torch.randn(rows, width + 8, device="cuda").to(dtype)
        x, weight = wide[:, :width], torch.randn(width, device="cuda").to(dtype)
        assert choose_rms_norm(x, weight).impl == "triton"
        want, got = (rms_norm(x, weight, 1e-5, impl=impl) for impl in ("reference", "triton"))
        # The sum of squares in another order may move the rounding of a value, once before and once after the weight.
        atol, rtol = (1e-6, 4e-6) if dtype == torch.float32 else (1e-6, 2.5 * torch.finfo(dtype).eps)
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    torch.library.opcheck(torch.ops.cptools.rms_norm, (x, weight, 1e-5))
    x[0, 5] = torch.nan
    assert rms_norm(x, weight, 1e-5)[0].isnan().all()
    assert not rms_norm(x, weight, 1e-5)[1].isnan().any()


def test_many_bf16_rows_are_multiplied_in_float32() -> None:
    for rows, width, outputs in ((1, 6144, 256), (1023, 512, 32), (1024, 6144, 256), (4097, 6144, 32), (1500, 100, 7)):
        x = torch.randn(rows, width, device="cuda").bfloat16()
        weight = torch.randn(outputs, width, device="cuda") * width**-0.5
        want = x.double() @ weight.double().t()
        got = linear_in_fp32(x, weight)
        assert got.dtype == torch.float32
        # As near as a product in float32, which no BF16 rounding of the matrix would be.
        assert (got - want).abs().max() <= 8 * (x.float() @ weight.t() - want).abs().max() + 1e-6
        assert (got - want).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_bit_for_bit(dtype: torch.dtype) -> None:
    for tokens, heads, width in ((0, 3, 64), (1, 64, 64), (7, 3, 6), (130, 8, 64), (33, 1, 128)):
        angles = RopeAngles.at(torch.randint(0, 1 << 20, (tokens,), device="cuda"), width, 1e4)
        x = torch.randn(tokens, heads, width + 192, device="cuda").to(dtype)[..., 192:]
        assert choose_rope_interleaved(x, angles).impl == "triton"
        want, got = (rope_interleaved(x, angles, impl=impl) for impl in ("reference", "triton"))
        assert torch.equal(got, want)
        flat = x[:, 0] if heads > 1 else x.squeeze(1)
        assert torch.equal(rope_interleaved(flat, angles), rope_interleaved(flat, angles, impl="reference"))
    torch.library.opcheck(torch.ops.cptools.rope_interleaved, (x, angles.cos, angles.sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_queries_bit_for_bit(dtype: torch.dtype) -> None:
    for tokens, heads, dim, rotated in (
        (0, 32, 128, 64),
        (1, 32, 128, 64),
        (129, 32, 128, 64),
        (9, 5, 96, 96),
        (4, 64, 32, 0),
    ):
        angles = RopeAngles.at(torch.randint(0, 1 << 20, (tokens,), device="cuda"), rotated, 1e4) if rotated else None
        query = (
            torch.randn(tokens, heads, dim, device="cuda") * 10 ** torch.randn(tokens, heads, 1, device="cuda")
        ).to(dtype)
        if tokens > 2:
            query[0, 0], query[1, 1, 3], query[2] = 0, torch.nan, torch.finfo(dtype).max / 4
        weights = torch.randn(tokens, heads, device="cuda")
        assert choose_fp8_query(query, weights, angles).impl == "triton"
        want, got = (fp8_query(query, weights, angles, impl=impl) for impl in ("reference", "triton"))
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours.float().nan_to_num(7e7), theirs.float().nan_to_num(7e7))
    torch.library.opcheck(torch.ops.cptools.fp8_query, (query[:1], weights[:1], None, None), test_utils="test_schema")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_each_head_in_place(dtype: torch.dtype) -> None:
    """Slices in, a slice out, and nothing beside it written."""
    for tokens in (0, 1, 5, 300):
        x = torch.randn(tokens, 16, 256, device="cuda").to(dtype)[..., :192]
        weight = torch.randn(16, 512, 192, device="cuda").to(dtype).transpose(1, 2)
        room = torch.full((tokens, 16, 576), 7.0, dtype=dtype, device="cuda")
        made = head_linear(x, weight, out=room[..., :512])
        want = torch.einsum("thd,hdo->tho", x.double(), weight.double())
        assert made.data_ptr() == room.data_ptr()
        assert (room[..., 512:] == 7).all()
        torch.testing.assert_close(made.double(), want, atol=1e-3 if dtype == torch.float32 else 0.3, rtol=2e-2)
        torch.testing.assert_close(head_linear(x, weight), made, atol=0, rtol=0)
