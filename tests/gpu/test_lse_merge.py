"""merge_states on the GPU against the reference in float64, and what the contract says of empty parts and NaN."""

import math

import pytest
import torch
from torch import Tensor

from cptools.kernels.lse_merge import choose_merge_states, merge_states, reference

pytestmark = pytest.mark.gpu

INF, NAN = math.inf, math.nan
CUDA = torch.device("cuda")


def parts(p: int, t: int, h: int, d: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random parts with empty ones that hold NaN; every part of token 0, head 0 is empty."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    outs = torch.randn(p, t, h, d, generator=generator, device=CUDA)
    lses = 10 * torch.randn(p, t, h, generator=generator, device=CUDA)
    lses[torch.rand(p, t, h, generator=generator, device=CUDA) < 0.2] = -INF
    lses[:, :1, :1] = -INF
    outs[torch.isneginf(lses)] = NAN
    return outs.to(dtype), lses


def expect(outs, lses) -> tuple[Tensor, Tensor]:
    return reference.merge_states([out.double() for out in outs], [lse.double() for lse in lses])


def check(outs, lses, out_dtype: torch.dtype = torch.float32) -> None:
    out, lse = merge_states(outs, lses, out_dtype=out_dtype, impl="triton")
    expected, expected_lse = expect(outs, lses)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[out_dtype]
    assert out.dtype == out_dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-7, atol=5e-7, equal_nan=True)


@pytest.mark.parametrize(
    "p, t, h, d",
    [
        *[(1, 3, 2, 512), (2, 1, 64, 512), (2, 300, 64, 512), (2, 900, 3, 512), (2, 70000, 1, 8)],
        *[(3, 7, 5, 40), (8, 9, 3, 576), (20, 5, 3, 96), (20, 200, 64, 128)],
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_any_number_of_parts(p, t, h, d, stacked) -> None:
    outs, lses = parts(p, t, h, d)
    assert choose_merge_states(outs).impl == "triton"
    check(outs if stacked else list(outs), lses if stacked else list(lses))
    check(outs if stacked else list(outs), lses if stacked else list(lses), torch.bfloat16)


def test_strided_and_mixed_parts() -> None:
    outs, lses = parts(9, 6, 4, 64, torch.float32)
    wide = torch.full((9, 6, 4, 80), NAN, device=CUDA)
    wide[..., :64] = outs
    by_head = lses.transpose(1, 2).contiguous().transpose(1, 2)
    check(wide[..., :64], by_head)
    check(list(wide[:2, ..., :64]), list(by_head[:2]))
    check([wide[0, ..., :64], outs[1].bfloat16(), outs[2].half()], [by_head[0], lses[1], lses[2]])
    check(outs.transpose(2, 3).contiguous().transpose(2, 3), lses)


def test_one_part_and_neutral_parts_come_back_bit_by_bit() -> None:
    x, lse = torch.randn(5, 3, 64, device=CUDA), torch.randn(5, 3, device=CUDA) * 50
    x[0, 0, 0] = -0.0
    none = (torch.full_like(x, NAN), torch.full_like(lse, -INF))
    for outs, lses in (([x], [lse]), ([none[0], x], [none[1], lse]), ([x, none[0]], [lse, none[1]])):
        out, merged = merge_states(outs, lses, impl="triton")
        assert torch.equal(out.view(torch.int32), x.view(torch.int32))
        assert torch.equal(merged, lse)
    out, merged = merge_states([none[0]] * 3, [none[1]] * 3, impl="triton")
    assert not out.any()
    assert torch.isneginf(merged).all()


@pytest.mark.parametrize("gap", [0.0, 1e-3, 1.0, 30.0, 80.0, 87.0, 100.0, 104.0, 1e3, 1e4])
def test_exact_at_any_gap(gap) -> None:
    for base in (0.0, -1e4, 1e4):
        lses = [torch.full((1, 1), base, device=CUDA), torch.full((1, 1), base - gap, device=CUDA)]
        outs = [torch.tensor([[[1.0, -3.0]]], device=CUDA), torch.tensor([[[5.0, 1e20]]], device=CUDA)]
        out, lse = merge_states(outs, lses, impl="triton")
        expected, expected_lse = expect(outs, lses)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1.2e-38 * 1e20)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1.3e-7, atol=5e-7)


def test_nan_and_infinity_stay_where_they_are() -> None:
    outs, lses = torch.randn(2, 4, 3, 16, device=CUDA), torch.randn(2, 4, 3, device=CUDA)
    clean = merge_states(outs, lses, impl="triton")[0]
    outs[0, 2, 1, 0] = NAN
    lses[1, 0, 2], lses[0, 3, 0], lses[1, 3, 1] = NAN, INF, NAN
    lses[0, 3, 1] = -INF
    out, lse = merge_states(outs, lses, impl="triton")
    touched = torch.zeros(4, 3, 16, dtype=torch.bool, device=CUDA)
    touched[2, 1, 0] = True
    touched[0, 2], touched[3, 0], touched[3, 1] = True, True, True
    assert torch.equal(out.isnan(), touched)
    assert torch.equal(out[~touched], clean[~touched])
    assert torch.equal(lse.isnan(), touched.all(-1))


def test_large_values_and_no_rows() -> None:
    outs = torch.tensor([1e30, -1e30], device=CUDA).view(2, 1, 1, 1).expand(2, 3, 2, 8)
    check(outs, torch.zeros(2, 3, 2, device=CUDA))
    for shape in ((0, 3), (3, 0)):
        out, lse = merge_states(
            [torch.empty(*shape, 8, device=CUDA)] * 2, [torch.empty(*shape, device=CUDA)] * 2, impl="triton"
        )
        assert out.shape == (*shape, 8)
        assert lse.shape == shape


def test_graph_replays_on_changed_contents() -> None:
    outs, lses = parts(2, 16, 64, 512)
    merge_states(list(outs), list(lses), out_dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = merge_states(list(outs), list(lses), out_dtype=torch.bfloat16)
    for seed in (1, 2):
        for target, value in zip((outs, lses), parts(2, 16, 64, 512, seed=seed), strict=True):
            target.copy_(value)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        expected, expected_lse = expect(outs, lses)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-7, atol=5e-7)


def test_opcheck() -> None:
    from cptools.kernels.lse_merge.triton import merge_parts, merge_stacked

    outs, lses = torch.randn(9, 3, 2, 16, device=CUDA), torch.randn(9, 3, 2, device=CUDA)
    torch.library.opcheck(merge_parts, (list(outs[:2]), list(lses[:2]), torch.bfloat16))
    torch.library.opcheck(merge_stacked, (outs, lses, torch.float32))
