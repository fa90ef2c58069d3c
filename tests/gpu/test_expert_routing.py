"""Routing kernels against the reference on the same GPU: choices bit by bit, ties, NaN, grouping of any size."""

import math

import pytest
import torch

from cptools.kernels.expert_routing import combine, group_by_expert, route

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAN = math.nan


@pytest.mark.parametrize("tokens", [0, 1, 5, 127, 3001])
@pytest.mark.parametrize("number, k", [(256, 8), (16, 4), (100, 1), (9, 9)])
@pytest.mark.parametrize("normalise", [True, False])
def test_route_chooses_as_the_reference(tokens, number, k, normalise) -> None:
    torch.manual_seed(tokens + number)
    logits, bias = 4 * torch.randn(tokens, number, device=CUDA), torch.randn(number, device=CUDA)
    kwargs = dict(k=k, normalise=normalise, scaling=2.5)
    experts, gates = route(logits, bias, impl="triton", **kwargs)
    expected, expected_gates = route(logits, bias, impl="reference", **kwargs)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(gates, expected_gates, rtol=5e-7, atol=0)


def test_route_of_ties_and_of_what_is_no_number() -> None:
    logits = torch.randn(40, 256, device=CUDA).round()
    logits[0], logits[1], logits[2] = 0.0, 200.0, -200.0
    logits[3, 7], logits[4] = NAN, NAN
    logits[5, :100], logits[5, 100:] = math.inf, -math.inf
    bias = torch.zeros(256, device=CUDA)
    for zero in (0.0, -0.0):
        bias[:] = zero
        experts, gates = route(logits, bias, k=8, impl="triton")
        expected, expected_gates = route(logits, bias, k=8, impl="reference")
        assert torch.equal(experts, expected)
        torch.testing.assert_close(gates, expected_gates, rtol=5e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [0, 1, 17, 256, 8192])
@pytest.mark.parametrize("kind", ["spread", "one expert", "few"])
def test_group_is_the_stable_sort(tokens, kind) -> None:
    number, k = 256, 8
    experts = torch.rand(tokens, number, device=CUDA).topk(k, 1).indices
    if kind == "one expert":
        experts = torch.full_like(experts, 255)
    elif kind == "few":
        experts = experts % 3
    for ids in (experts, experts.int()):
        for found, expected in zip(
            group_by_expert(ids, number, impl="triton"), group_by_expert(ids, number, impl="reference"), strict=True
        ):
            assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("columns", [6144, 1000, 3])
def test_combine_adds_in_fp32(tokens, columns) -> None:
    outputs = torch.randn(tokens * 8 + 5, columns, device=CUDA).bfloat16()
    outputs[tokens * 8 :] = NAN  # rows of nobody
    slots = torch.randperm(tokens * 8, device=CUDA).view(tokens, 8)
    gates = torch.rand(tokens, 8, device=CUDA)
    expected = (outputs[slots].double() * gates.double()[:, :, None]).sum(1)
    out = combine(outputs, slots, gates, impl="triton")
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-7)
    exact = combine(outputs.float(), slots, gates, impl="triton")
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-5)


def test_graph_replays_on_changed_contents() -> None:
    logits, bias = torch.randn(32, 256, device=CUDA), torch.randn(256, device=CUDA)
    outputs = torch.randn(256, 64, device=CUDA)

    def step() -> tuple[torch.Tensor, ...]:
        experts, gates = route(logits, bias, k=8, impl="triton")
        groups = group_by_expert(experts, 256, impl="triton")
        return experts, groups.counts, combine(outputs, groups.slots, gates, impl="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        logits.normal_()
        outputs.normal_()
        graph.replay()
        for found, expected in zip(captured, step(), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(captured[0], route(logits, bias, k=8, impl="reference")[0])


def test_opcheck() -> None:
    from cptools.kernels.expert_routing import triton

    logits, bias = torch.randn(3, 16, device=CUDA), torch.randn(16, device=CUDA)
    torch.library.opcheck(triton.route, (logits, bias, 4, True, 2.5))
    experts, gates = triton.route(logits, bias, 4, True, 2.5)
    torch.library.opcheck(triton.group_by_expert, (experts, 16))
    _, slots, _ = triton.group_by_expert(experts, 16)
    torch.library.opcheck(triton.combine, (torch.randn(12, 8, device=CUDA), slots, gates))
