import math
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cptools.kernels.lse_merge import merge_states, merge_weights
from cptools.partial import Partial, merge_partials

INF, NAN = math.inf, math.nan


def part(out: list[float], lse: float, *, dtype: torch.dtype = torch.float32) -> Partial:
    """One token, one head."""
    return Partial(torch.tensor([[out]], dtype=dtype), torch.tensor([[lse]]))


def random_part(tokens: int, heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Partial:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    return Partial(out, 10 * torch.randn(tokens, heads, generator=generator))


def attention(scores: Tensor, values: Tensor, *, garbage: float = 0.0) -> Partial:
    """scores [T, H, S], values [S, H, D], fp64, with `garbage` as the output of queries that see no key."""
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(scores.shape[:2], -INF, dtype=scores.dtype)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("ths,shd->thd", weights, values)
    out = torch.where(torch.isneginf(lse).unsqueeze(-1), garbage, out)
    return Partial(out.float(), lse.float())


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(a: Partial, b: Partial) -> None:
    assert a.out.dtype == b.out.dtype
    assert a.out.shape == b.out.shape
    assert torch.equal(bits(a.out), bits(b.out))
    assert torch.equal(bits(a.lse), bits(b.lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_part_comes_back_bit_by_bit(dtype) -> None:
    x = random_part(5, 3, 4, seed=0, dtype=dtype)
    x.out[0, 0, 0], x.out[0, 0, 1] = -0.0, 0.0
    assert_same_bits(merge_partials([x]), x)


@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_empty_parts_are_neutral_bit_by_bit(garbage) -> None:
    x = random_part(5, 3, 4, seed=1)
    x.out[0, 0, 0] = -0.0
    none = Partial(torch.full_like(x.out, garbage), torch.full_like(x.lse, -INF))
    for parts in ([none, x], [x, none], [none, x, none, none]):
        assert_same_bits(merge_partials(parts), x)


def test_merge_both_empty() -> None:
    """Every part empty: 0 and -inf, and neutral when merged on."""
    none = Partial.empty(2, 3, 4)
    poisoned = Partial(torch.full((2, 3, 4), NAN), none.lse.clone())
    merged = merge_partials([poisoned, none, poisoned])
    assert_same_bits(merged, none)
    assert_same_bits(merge_partials([poisoned]), none)
    x = random_part(2, 3, 4, seed=2)
    assert_same_bits(merge_partials([merged, x]), x)


def test_empty_is_decided_per_token_and_head() -> None:
    a, b = random_part(2, 2, 3, seed=3), random_part(2, 2, 3, seed=4)
    a.out[0, 1], a.lse[0, 1] = NAN, -INF
    b.out[1, 0], b.lse[1, 0] = NAN, -INF
    merged = merge_partials([a, b])
    assert not merged.out.isnan().any()
    assert torch.equal(merged.out[0, 1], b.out[0, 1])
    assert torch.equal(merged.out[1, 0], a.out[1, 0])


@pytest.mark.parametrize("gap", [0.0, 1e-3, 1.0, 30.0, 80.0, 87.0, 100.0, 104.0, 1e3, 1e4])
@pytest.mark.parametrize("base", [0.0, -1e4, 1e4])
def test_merge_is_exact_at_any_gap(gap, base) -> None:
    lses = [torch.tensor([[base]]), torch.tensor([[base - gap]])]
    outs = [torch.tensor([[[1.0, -3.0]]]), torch.tensor([[[5.0, 1e20]]])]
    weight = torch.stack(lses).double().softmax(0)
    expected = sum(w.unsqueeze(-1) * out.double() for w, out in zip(weight, outs, strict=True))
    expected_lse = torch.logsumexp(torch.stack(lses).double(), 0)
    for order in (slice(None), slice(None, None, -1)):
        out, lse = merge_states(outs[order], lses[order])
        assert out.dtype == lse.dtype == torch.float32
        # exp of a subnormal result keeps fewer bits: hence the absolute term, that of the smallest normal weight.
        torch.testing.assert_close(out.double(), expected, rtol=4e-7, atol=1.2e-38 * 1e20)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1.3e-7, atol=1e-7)


def test_weights_do_not_suffer_from_a_large_lse() -> None:
    """exp(lse_p - merged lse) would be wrong by 4e-4 here: the merged lse is rounded to 1/1024."""
    weights, _ = merge_weights([torch.tensor([[1e4]]), torch.tensor([[1e4 - 1.0]])])
    torch.testing.assert_close(
        weights.flatten(), torch.tensor([1.0, math.exp(-1)]) / (1 + math.exp(-1)), rtol=2e-7, atol=0
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 2**32 - 1))
@example([0, 0, 1, 2, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], 11142440)
@settings(max_examples=60, deadline=None)
def test_merge_of_any_split_is_dense_attention(owner, seed) -> None:
    """Key s goes to part owner[s]; parts without keys hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    scores = 8 * torch.randn(3, 2, len(owner), generator=generator, dtype=torch.float64)
    values = torch.randn(len(owner), 2, 5, generator=generator, dtype=torch.float64)
    owner = torch.tensor(owner)
    parts = [attention(scores[..., owner == p], values[owner == p], garbage=NAN) for p in range(4)]
    dense = attention(scores, values)
    for merged in (merge_partials(parts), merge_partials([merge_partials(parts[:2]), merge_partials(parts[2:])])):
        # Each of two merges weighs by lse that float32 rounded, which moves a weight by that much of itself.
        rounding = 4 * 2**-24 * dense.lse.abs().max().item() * values.abs().max().item()
        torch.testing.assert_close(merged.out, dense.out, rtol=1e-6, atol=1e-6 + rounding)
        torch.testing.assert_close(merged.lse, dense.lse, rtol=1e-6, atol=1e-6)


def test_short_prompt_leaves_ranks_without_keys() -> None:
    """Three cached tokens over eight ranks: five are empty and hold anything (case B1)."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(1, 2, 3, generator=generator, dtype=torch.float64)
    values = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    parts = [attention(scores[..., r::8], values[r::8], garbage=NAN) for r in range(8)]
    merged, dense = merge_partials(parts), attention(scores, values)
    torch.testing.assert_close(merged.out, dense.out)
    torch.testing.assert_close(merged.lse, dense.lse)


def test_keys_all_later_than_the_query_are_empty() -> None:
    """A part may hold keys and yet show none of them to a query (case B2)."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(4, 1, 4, generator=generator, dtype=torch.float64)
    values = torch.randn(4, 1, 4, generator=generator, dtype=torch.float64)
    scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1)[:, None], -INF)
    merged = merge_partials(
        [attention(scores[..., :2], values[:2]), attention(scores[..., 2:], values[2:], garbage=NAN)]
    )
    torch.testing.assert_close(merged.out, attention(scores, values).out)


def test_prefix_and_extension() -> None:
    """4096 keys of a prefix and 64 new ones (case B10: an error of 0.1 from a mix of bases)."""
    generator = torch.Generator().manual_seed(7)
    scores = 3 * torch.randn(2, 2, 4160, generator=generator, dtype=torch.float64)
    values = torch.randn(4160, 2, 8, generator=generator, dtype=torch.float64)
    merged = merge_partials(
        [attention(scores[..., :4096], values[:4096]), attention(scores[..., 4096:], values[4096:])]
    )
    torch.testing.assert_close(merged.out, attention(scores, values).out, rtol=1e-6, atol=1e-6)


def test_a_sink_counts_once() -> None:
    """A sink is a part of its own without a value (case A22)."""
    generator = torch.Generator().manual_seed(8)
    scores = torch.randn(2, 1, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64)
    sink = Partial(torch.zeros(2, 1, 4), torch.full((2, 1), 0.7))
    merged = merge_partials([attention(scores[..., r::2], values[r::2]) for r in range(2)] + [sink])
    with_sink = torch.cat([scores, torch.full((2, 1, 1), 0.7, dtype=torch.float64)], -1)
    expected = attention(with_sink, torch.cat([values, torch.zeros(1, 1, 4, dtype=torch.float64)]))
    torch.testing.assert_close(merged.out, expected.out)


def test_base_2_and_natural_logarithms_meet() -> None:
    """Sums of exponentials 2 and 8, outputs 1 and 0: 0.2 whatever the kernel's base (cases B7, B8)."""
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    base2 = [Partial.from_base2(one, torch.tensor([[1.0]])), Partial.from_base2(zero, torch.tensor([[3.0]]))]
    natural = [part([1.0], math.log(2)), part([0.0], math.log(8))]
    for a, b in product((base2[0], natural[0]), (base2[1], natural[1])):
        merged = merge_partials([a, b])
        assert merged.out.item() == pytest.approx(0.2, abs=1e-7)
        assert merged.lse.item() == pytest.approx(math.log(10), abs=3e-7)


def test_from_base2_rounds_once() -> None:
    lse2 = torch.tensor([[-INF, 0.0, -3.7, 1234.5, 14000.0, NAN]])
    made = Partial.from_base2(torch.zeros(1, 6, 1), lse2)
    assert torch.equal(made.lse[0, :5], (lse2.double() * math.log(2)).float()[0, :5])
    assert made.lse[0, 0] == -INF
    assert made.lse[0, 5].isnan()


def test_from_posinf_empty() -> None:
    """FlashMLA marks a query without keys by +inf; everything else passes."""
    made = Partial.from_posinf_empty(torch.full((1, 4, 1), NAN), torch.tensor([[INF, -INF, 2.5, NAN]]))
    assert made.lse[0, :3].tolist() == [-INF, -INF, 2.5]
    assert made.lse[0, 3].isnan()
    assert merge_partials([Partial(made.out[:, :1], made.lse[:, :1]), part([3.0], 0.0)]).out.item() == 3.0


def test_nan_stays_visible() -> None:
    good = part([1.0], 5.0)
    for bad in (part([1.0], NAN), part([NAN], 5.0), part([NAN], -1e4)):
        assert merge_partials([good, bad]).out.isnan().all()
        assert merge_partials([bad, good]).out.isnan().all()
    assert merge_partials([good, part([1.0], NAN)]).lse.isnan().all()
    assert not merge_partials([good, part([NAN], 5.0)]).lse.isnan().any()


def test_nan_stays_with_its_token_and_head() -> None:
    a, b = random_part(4, 3, 2, seed=9), random_part(4, 3, 2, seed=10)
    expected = merge_partials([a, b])
    a.out[2, 1, 0] = b.lse[0, 2] = NAN
    merged = merge_partials([a, b])
    touched = torch.zeros(4, 3, 2, dtype=torch.bool)
    touched[2, 1, 0] = touched[0, 2] = True
    assert torch.equal(merged.out.isnan(), touched)
    assert torch.equal(merged.out[~touched], expected.out[~touched])


def test_posinf_raises_in_merge_and_is_nan_in_the_kernel() -> None:
    good, bad = part([1.0], 5.0), part([1.0], INF)
    with pytest.raises(ValueError, match=r"partial 1 has lse=\+inf in 1 of 1 places"):
        merge_partials([good, bad])
    out, lse = merge_states([good.out, bad.out], [good.lse, bad.lse])
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("tokens, heads", [(0, 3), (3, 0), (0, 0)])
def test_no_tokens_or_no_heads(tokens, heads) -> None:
    merged = merge_partials([Partial.empty(tokens, heads, 4)] * 2)
    assert merged.out.shape == (tokens, heads, 4)
    assert merged.lse.shape == (tokens, heads)


def test_dtype_of_the_result() -> None:
    half, single, double = (random_part(2, 2, 2, 11, t) for t in (torch.bfloat16, torch.float32, torch.float64))
    assert merge_partials([half, half]).out.dtype == torch.bfloat16
    assert merge_partials([half, single]).out.dtype == torch.float32
    assert merge_partials([double, double]).out.dtype == torch.float64
    assert merge_partials([double, single]).lse.dtype == torch.float32


def test_bf16_parts_are_added_in_fp32() -> None:
    """256 equal shares of 1: a bf16 sum would stop growing."""
    parts = [part([1.0], 0.0, dtype=torch.bfloat16)] * 256
    assert merge_partials(parts).out.item() == 1.0


def test_bits_do_not_depend_on_the_other_tokens_or_heads() -> None:
    parts = [random_part(37, 6, 5, seed) for seed in range(3)]
    whole = merge_partials(parts)
    for tokens, heads in product((slice(0, 1), slice(5, 22), slice(36, 37)), (slice(0, 3), slice(5, 6))):
        some = merge_partials([Partial(p.out[tokens, heads], p.lse[tokens, heads]) for p in parts])
        assert_same_bits(some, Partial(whole.out[tokens, heads], whole.lse[tokens, heads]))


def test_inputs_are_not_written() -> None:
    parts = [random_part(3, 2, 2, 12), Partial(torch.full((3, 2, 2), NAN), torch.full((3, 2), -INF))]
    before = [(p.out.clone(), p.lse.clone()) for p in parts]
    merge_partials(parts)
    for p, (out, lse) in zip(parts, before, strict=True):
        assert_same_bits(p, Partial(out, lse))


@pytest.mark.parametrize(
    "out, lse, message",
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), r"\(2, 3\)"),
        (torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(2, 3), "int32"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 2), r"float32 \(2, 3\) .* \(3, 2\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, device="meta"), "cpu, lse on meta"),
    ],
)
def test_bad_partials(out, lse, message) -> None:
    with pytest.raises(ValueError, match=message):
        Partial(out, lse)


def test_bad_lists() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge_partials([])
    with pytest.raises(ValueError, match=r"partial 1 is \(2, 3, 5\)"):
        merge_partials([Partial.empty(2, 3, 4), Partial.empty(2, 3, 5)])
