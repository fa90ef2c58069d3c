"""Routing against spelled-out loops: which experts, with what weight, in which rows, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptools.kernels import expert_routing
from cptools.kernels.expert_routing import choose_expert_routing, combine, group_by_expert, route


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_bias_selects_and_does_not_weigh(tokens, normalise) -> None:
    logits, bias = normal(tokens, 11), 3 * normal(11, seed=1)
    experts, gates = route(logits, bias, k=3, normalise=normalise, scaling=2.5)
    assert (experts.shape, experts.dtype, gates.dtype) == ((tokens, 3), torch.int64, torch.float32)
    for token in range(tokens):
        p = [float(torch.sigmoid(x.double())) for x in logits[token]]
        best = sorted(range(11), key=lambda e: -(p[e] + float(bias[e])))[:3]
        assert experts[token].tolist() == sorted(best)
        total = sum(p[e] for e in best) if normalise else 1.0
        assert gates[token].tolist() == pytest.approx([2.5 * p[e] / total for e in sorted(best)], rel=1e-6)


def test_equal_scores_choose_the_lower_experts() -> None:
    logits = torch.zeros(2, 9)
    logits[1, 7] = 1.0
    assert route(logits, torch.zeros(9), k=2)[0].tolist() == [[0, 1], [0, 7]]


@settings(deadline=None, max_examples=40)
@given(tokens=st.integers(0, 20), k=st.integers(1, 4), number=st.integers(4, 9), seed=st.integers(0, 2**16))
def test_groups_are_a_stable_sort_and_its_inverse(tokens, k, number, seed) -> None:
    experts = torch.rand(tokens, number, generator=torch.Generator().manual_seed(seed)).topk(k, 1).indices
    order, slots, counts = group_by_expert(experts, number)
    flat = experts.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert order[slots.flatten()].tolist() == list(range(len(flat)))
    assert slots.shape == experts.shape
    assert counts.tolist() == [flat.count(e) for e in range(number)]


def test_combined_rows_come_from_their_slots() -> None:
    outputs, gates = normal(6, 5), normal(3, 2, seed=1)
    slots = torch.tensor([[4, 0], [1, 5], [3, 2]])
    expected = (outputs[slots] * gates[:, :, None]).sum(1)
    torch.testing.assert_close(combine(outputs, slots, gates), expected)
    assert combine(outputs.bfloat16(), slots, gates).dtype == torch.bfloat16
    assert combine(outputs[:0], slots[:0], gates[:0]).shape == (0, 5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits \[2, 9\], bias \[8\], k=2"):
        route(torch.zeros(2, 9), torch.zeros(8), k=2)
    with pytest.raises(ValueError, match="k=10"):
        route(torch.zeros(2, 9), torch.zeros(9), k=10)
    with pytest.raises(ValueError, match=r"slots \[3, 2\], gates \[3, 3\]"):
        combine(torch.zeros(6, 5), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 3))
    assert choose_expert_routing(torch.zeros(1), experts=2, k=1).fallback_reason == "triton: tensors are on cpu"


def test_the_kernel_gets_scores_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the bias by its address and rows of logits by one stride: every other column was read as the next."""
    kernels = pytest.importorskip("cptools.kernels.expert_routing.triton", reason="the kernels need triton")
    monkeypatch.setattr(expert_routing, "triton_obstacle", lambda device: None)

    def route(logits, bias, k, normalise, scaling):
        assert logits.stride(1) == 1
        assert bias.is_contiguous()
        return expert_routing.reference.route(logits, bias, k=k, normalise=normalise, scaling=scaling)

    monkeypatch.setattr(kernels, "route", route)
    logits, bias = torch.randn(5, 32)[:, ::2], torch.randn(16, 2)[:, 0]
    got = expert_routing.route(logits, bias, k=3, impl="triton")
    want = expert_routing.route(logits.clone(), bias.clone(), k=3, impl="reference")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
