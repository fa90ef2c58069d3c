"""The Triton top-k against the reference: equal positions and equal bits of scores, whatever the distribution."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cptools.kernels.topk_select import (
    INVALID,
    choose_merge_orders,
    choose_topk_select,
    encode_order,
    merge_orders,
    topk_select,
)

pytestmark = pytest.mark.gpu

INF, NAN = math.inf, math.nan


def normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device="cuda")


def uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, columns, generator=generator, device="cuda")


def steps(columns: int) -> Tensor:
    return torch.arange(columns, device="cuda")


def constant(value: float) -> Callable[[int, int, torch.Generator], Tensor]:
    return lambda t, s, g: torch.full((t, s), value, device="cuda")


DISTRIBUTIONS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": normal,
    "positive": uniform,
    "two values": lambda t, s, g: uniform(t, s, g).round(),
    "few values": lambda t, s, g: (10 * normal(t, s, g)).round(),
    "zeros": lambda t, s, g: torch.where(uniform(t, s, g) < 0.5, 0.0, -0.0),
    "constant": constant(-3.25),
    "all -inf": constant(-INF),
    "all +inf": constant(INF),
    "all NaN": constant(NAN),
    "rising": lambda t, s, g: steps(s).float().repeat(t, 1),
    "falling": lambda t, s, g: -steps(s).float().repeat(t, 1),
    "close": lambda t, s, g: 1.0 + 1e-3 * uniform(t, s, g),
    "subnormal": lambda t, s, g: 1e-42 * normal(t, s, g),
    "recent": lambda t, s, g: normal(t, s, g) + 9.0 * (steps(s) > s - 4096),
    "every 16th": lambda t, s, g: normal(t, s, g) + 9.0 * (steps(s) % 16 == 0),
}


@pytest.fixture(autouse=True)
def poisoned_gpu_memory() -> None:
    """Blocks that the allocator gives next hold what looks like the best candidates of all."""
    for size in (1 << 14, 1 << 18, 1 << 22, 1 << 25):
        torch.full((size,), 2**62, dtype=torch.int64, device="cuda")


def mixed(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    scores = torch.randn(rows, columns, generator=generator, device="cuda")
    draw = torch.rand(rows, columns, generator=generator, device="cuda")
    for bound, value in ((0.02, NAN), (0.04, INF), (0.06, -INF), (0.08, 1e30), (0.1, -1e30), (0.2, -0.0), (0.3, 0.0)):
        scores[(draw < bound) & (draw >= bound - 0.02)] = value
    return scores


def assert_selects(scores: Tensor, k: int, lengths: Tensor | None = None) -> None:
    wanted = topk_select(scores, k, lengths=lengths, impl="reference")
    found = topk_select(scores, k, lengths=lengths, impl="triton")
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1].view(torch.int32), wanted[1].view(torch.int32))
    by_position = [
        topk_select(scores, k, lengths=lengths, sorted_by="position", impl=impl) for impl in ("reference", "triton")
    ]
    assert torch.equal(by_position[0][0], by_position[1][0])
    assert torch.equal(by_position[0][1].view(torch.int32), by_position[1][1].view(torch.int32))
    positions, chosen = topk_select(
        scores, k, lengths=lengths, sorted_by="none", positions_dtype=torch.int32, impl="triton"
    )
    assert positions.dtype == torch.int32
    keys = encode_order(chosen, positions.clamp(min=0)).masked_fill_(positions < 0, INVALID)
    ordered = torch.where(wanted[0] < 0, INVALID, encode_order(wanted[1], wanted[0].clamp(min=0)))
    assert torch.equal(keys.sort(dim=1, descending=True).values, ordered)
    assert torch.equal(positions < 0, wanted[0] < 0)  # valid first


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(1, 131072), (3, 40001), (300, 10240)])
def test_any_distribution(name: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(len(name))
    assert_selects(DISTRIBUTIONS[name](*shape, generator), 2048)


@pytest.mark.parametrize("k", [1, 7, 512, 513, 2048])
@pytest.mark.parametrize("columns", [1, 5, 2047, 4096, 4097, 8192, 8193, 12289, 100003])
def test_sizes_and_prefix_lengths(k: int, columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(k)
    scores = mixed(9, columns, generator)
    lengths = torch.tensor([columns, 0, 1, -4, columns + 9, columns // 2, k, columns - 1, 3], device="cuda")
    poisoned = torch.where(steps(columns) < lengths.unsqueeze(1), scores, NAN)
    assert_selects(scores, k)
    assert_selects(poisoned, k, lengths)
    if k == 7:
        assert_selects(poisoned, k, lengths.int())


def test_long_row_and_strides() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    assert_selects(torch.randn(2, 1 << 20, generator=generator, device="cuda"), 2048)
    assert_selects(torch.randn(20, 1 << 17, generator=generator, device="cuda"), 2048)
    wide = torch.randn(40, 30011, generator=generator, device="cuda")
    assert_selects(wide[:, 3:29000], 2048)
    assert_selects(wide.t()[:20000], 33)


def test_rows_beyond_int32_elements() -> None:
    scores = torch.empty(270000, 8320, device="cuda").fill_(-1.0)
    scores[-1] = torch.arange(8320, device="cuda")
    positions, chosen = topk_select(scores, 16, sorted_by="score", impl="triton")
    assert positions[-1].tolist() == list(range(8319, 8303, -1))
    assert torch.equal(positions[:-1], torch.arange(16, device="cuda").expand(len(scores) - 1, -1))
    assert chosen[0].tolist() == [-1.0] * 16


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_sample_that_misleads(rows: int) -> None:
    columns, draws = 65536, 2048
    pairs = torch.arange(draws, device="cuda")
    stride = columns // (2 * draws)
    sampled = (pairs * stride + ((pairs * 0x9E3779B9 & 0xFFFFFFFF) * stride >> 32)).unsqueeze(1) * 2
    sampled = torch.cat([sampled, sampled + 1], 1).flatten()
    generator = torch.Generator("cuda").manual_seed(3)
    for bonus in (10.0, -10.0):  # all that is wanted was drawn, or nothing of it
        scores = normal(rows, columns, generator)
        scores[:, sampled] += bonus
        assert_selects(scores, 2048)


@pytest.mark.parametrize("columns", [1, 2048, 4096, 16384, 32768])
@pytest.mark.parametrize("k", [3, 512, 2048])
def test_merge_orders(columns: int, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(k)
    keys = encode_order(mixed(5, columns, generator), torch.randperm(columns, device="cuda"))
    keys[torch.rand(5, columns, generator=generator, device="cuda") < 0.3] = INVALID
    keys[3] = INVALID
    assert torch.equal(merge_orders(keys, k, impl="triton"), merge_orders(keys, k, impl="reference"))
    few = torch.randint(-3, 3, (5, columns), generator=generator, device="cuda")  # duplicates
    assert torch.equal(merge_orders(few, k, impl="triton"), merge_orders(few, k, impl="reference"))


def test_nothing_to_select_from() -> None:
    for shape in ((0, 7), (2, 0)):
        positions, chosen = topk_select(torch.empty(shape, device="cuda"), 3, impl="triton")
        assert positions.tolist() == [[-1] * 3] * shape[0]
        assert chosen.tolist() == [[-INF] * 3] * shape[0]
        merged = merge_orders(torch.empty(shape, dtype=torch.int64, device="cuda"), 3, impl="triton")
        assert merged.tolist() == [[INVALID] * 3] * shape[0]


@pytest.mark.parametrize("shape", [(1, 131072), (140, 20000)])
def test_graph_replay_with_changed_contents(shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    scores = torch.randn(*shape, generator=generator, device="cuda")
    lengths = torch.full(shape[:1], shape[1], device="cuda")
    topk_select(scores, 2048, lengths=lengths, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions, chosen = topk_select(scores, 2048, lengths=lengths, impl="triton")
    for round_number in range(3):
        scores.normal_(generator=generator)
        lengths.fill_(shape[1] // (round_number + 1) ** 3)
        graph.replay()
        wanted = topk_select(scores, 2048, lengths=lengths, impl="reference")
        assert torch.equal(positions, wanted[0])
        assert torch.equal(chosen, wanted[1])


def test_registered_ops() -> None:
    from cptools.kernels.topk_select import triton as kernels

    scores = torch.randn(2, 20000, device="cuda")
    lengths = torch.tensor([5, 20000], device="cuda")
    torch.library.opcheck(kernels.topk_select, (scores, 100, lengths, "score", torch.int64))
    torch.library.opcheck(kernels.merge_orders, (encode_order(scores, torch.arange(20000, device="cuda")), 100))


def test_choice() -> None:
    scores = torch.zeros(2, 4096, device="cuda")
    assert choose_topk_select(scores, 2048).impl == "triton"
    refused = choose_topk_select(scores, 2049)
    assert refused.impl == "reference"
    assert refused.fallback_reason == "triton: k is 2049, more than 2048"
    assert choose_merge_orders(scores.long(), 7).impl == "triton"
    assert topk_select(scores, 2049)[0].shape == (2, 2049)
