"""Sampling: distributions against exact ones, draws against them by chi-square, and no dependence on a batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from cptools.kernels.sampling import (
    ACCEPT,
    DRAFT,
    SAMPLE,
    Sampling,
    SamplingRows,
    draw,
    probabilities,
    sample,
    token_logprobs,
    uniforms,
    verify_drafts,
)
from cptools.kernels.sampling.philox import philox
from tests.chi_square import SIGNIFICANCE, histogram, p_value

DRAWS = 20_000


def many(setting: Sampling, rows: int) -> SamplingRows:
    return SamplingRows.of([setting]).repeat(rows)


def random_settings(rows: int) -> list[Sampling]:
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 9, "top_p": 0.5},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 1000},
    ]
    return [Sampling(**kinds[i % len(kinds)], seed=i // 2, request=i % 2) for i in range(rows)]


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox(counter, key, words) -> None:
    """Those that its authors publish."""
    made = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in made) == words


def test_numbers_are_uniform_and_differ_in_everything_they_are_for() -> None:
    seed, request, at = torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 1, 0]), torch.tensor([5, 5, 5, 6])
    rows = [uniforms(seed, request, at, purpose=purpose, count=DRAWS) for purpose in (SAMPLE, ACCEPT, DRAFT)]
    numbers = torch.cat(rows)
    assert len(numbers.unique(dim=0)) == 12
    assert 0 < numbers.min() < numbers.max() < 1
    for row in numbers:
        assert p_value(histogram((row * 100).long(), 100), torch.full((100,), 0.01)) > SIGNIFICANCE
    # No correlation between rows: pairs fall evenly into a grid.
    for a, b in ((0, 1), (0, 2), (0, 3), (0, 4), (0, 8), (4, 8)):
        cells = (numbers[a] * 10).long() * 10 + (numbers[b] * 10).long()
        assert p_value(histogram(cells, 100), torch.full((100,), 0.01)) > SIGNIFICANCE, (a, b)


def naive_probabilities(logits: list[float], s: Sampling) -> list[float]:
    """One row, float64, in the words of the docstrings."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.temperature == 0:
        return [float(i == order[0]) for i in range(len(logits))]
    kept = order[: s.top_k or None]
    weights = torch.tensor([logits[i] for i in kept], dtype=torch.float64).div(s.temperature).softmax(0).tolist()
    total, result = 0.0, [0.0] * len(logits)
    for i, weight in zip(kept, weights, strict=True):
        if total >= s.top_p and s.top_p < 1:
            break
        result[i] = weight
        total += weight
    return [value / total for value in result]


def test_probabilities_agree_with_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(41, 37, generator=generator) * 3
    logits[::3] = (logits[::3] * 2).round() / 2  # ties
    logits[5, 3:9] = -torch.inf
    settings = random_settings(41)
    made = probabilities(logits, SamplingRows.of(settings))
    want = torch.tensor([naive_probabilities(row.tolist(), s) for row, s in zip(logits, settings, strict=True)])
    torch.testing.assert_close(made, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(made > 0, want > 0)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 2.0]])
    for setting, kept in (
        (Sampling(), [1]),
        (Sampling(temperature=1.0, top_k=2), [1, 3]),
        (Sampling(temperature=1.0, top_k=4), [0, 1, 3, 4]),
        (Sampling(temperature=1.0, top_p=0.5), [1, 3]),
    ):
        assert probabilities(logits, SamplingRows.of([setting]))[0].nonzero().flatten().tolist() == kept
    assert sample(logits, SamplingRows.of([Sampling()]), torch.tensor([0])).tolist() == [1]
    assert token_logprobs(logits, torch.tensor([4]), 5).ids.tolist() == [[1, 3, 4, 0, 2]]


def test_a_tiny_top_p_or_temperature_leaves_the_best_token() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    for setting in (Sampling(temperature=1.0, top_p=1e-12), Sampling(temperature=1e-30)):
        assert torch.equal(sample(logits, many(setting, 50), torch.arange(50)), logits.argmax(1))


@pytest.mark.parametrize("by", ["position", "seed", "request"])
def test_draws_follow_the_weights(by: str) -> None:
    weights = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.04, 0.01])
    positions = torch.arange(DRAWS) if by == "position" else torch.full((DRAWS,), 7)
    settings = [Sampling(1.0, **({} if by == "position" else {by: i})) for i in range(DRAWS)]
    tokens = draw(weights.expand(DRAWS, -1), SamplingRows.of(settings), positions)
    assert p_value(histogram(tokens, 6), weights) > SIGNIFICANCE
    tilted = torch.tensor([0.48, 0.0, 0.27, 0.2, 0.04, 0.01])
    assert p_value(histogram(tokens, 6), tilted) < SIGNIFICANCE


def test_draws_from_many_equal_tokens_prefer_none() -> None:
    """Numbers too coarse near 0 would tie, and ties prefer low ids."""
    vocab = 50_001
    tokens = draw(torch.ones(1, vocab).expand(100, -1), many(Sampling(1.0), 100), torch.arange(100))
    assert p_value(histogram(tokens * 10 // vocab, 10), torch.full((10,), 0.1)) > SIGNIFICANCE


def target(prefix_tables: Tensor, drafts: Tensor) -> Tensor:
    """log p of two successive tokens and a third [R, 3, V] after drafts [R, 2], by tables [1 + V, V] of what follows
    nothing and what follows each token."""
    return torch.stack([prefix_tables[0].expand(len(drafts), -1), *(prefix_tables[1 + d] for d in drafts.t())], dim=1)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(
    "setting", [Sampling(1.0), Sampling(0.6, top_k=4), Sampling(1.0, top_p=0.85)], ids=["plain", "top_k", "top_p"]
)
def test_tokens_behind_drafts_are_distributed_as_without_them(setting: Sampling, one_hot: bool) -> None:
    vocab = 5
    generator = torch.Generator().manual_seed(2)
    p_logits = torch.randn(1 + vocab, vocab, generator=generator)
    q_logits = p_logits + torch.randn(1 + vocab, vocab, generator=generator)
    rows = many(setting, DRAWS)
    positions = 3 * torch.arange(DRAWS)
    if one_hot:
        first = q_logits[0].argmax().expand(DRAWS)
        drafts, draft_probs = torch.stack([first, q_logits[1 + first].argmax(1)], dim=1), None
    else:
        first_q = probabilities(q_logits[0].expand(DRAWS, -1), rows)
        first = draw(first_q, rows, positions, purpose=DRAFT)
        second_q = probabilities(q_logits[1 + first], rows)
        drafts = torch.stack([first, draw(second_q, rows, positions + 1, purpose=DRAFT)], dim=1)
        draft_probs = torch.stack([first_q, second_q], dim=1)
    counts = torch.full((DRAWS,), 2)
    got = verify_drafts(target(p_logits, drafts), drafts, rows, positions, counts=counts, draft_probs=draft_probs)

    exact = probabilities(p_logits, many(setting, 1 + vocab))
    assert p_value(histogram(got.tokens[:, 0], vocab), exact[0]) > SIGNIFICANCE
    # Each further token, given the one before it and that it was reached.
    compared = 0
    for column in (1, 2):
        for before in range(vocab):
            tokens = got.tokens[got.tokens[:, column - 1] == before, column]
            tokens = tokens[tokens >= 0]
            if len(tokens) > 500:
                compared += 1
                assert p_value(histogram(tokens, vocab), exact[1 + before]) > SIGNIFICANCE, (column, before)
    assert compared >= 2
    assert all(got.accepted.eq(n).sum() > 500 for n in (0, 1, 2))
    # Drafts that are always believed would show.
    assert p_value(histogram(drafts[:, 0], vocab), exact[0]) < SIGNIFICANCE
    # Acceptance is what the theory says: sum of min(p, q).
    q = torch.zeros(vocab).scatter_(0, drafts[:1, 0], 1.0) if draft_probs is None else draft_probs[0, 0]
    rate = float(torch.minimum(exact[0], q).sum())
    kept = torch.tensor([int(got.accepted.eq(0).sum()), int(got.accepted.gt(0).sum())])
    assert p_value(kept, torch.tensor([1 - rate, rate])) > SIGNIFICANCE


def naive_greedy(logits: Tensor, drafts: list[int], count: int) -> list[int]:
    tokens = []
    for row, draft in zip(logits, [*drafts[:count], -1], strict=False):
        tokens.append(int(row.argmax()))
        if tokens[-1] != draft:
            break
    return tokens


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("among_drawn", [False, True])
def test_greedy_drafts_are_kept_up_to_the_first_wrong_one(steps: int, among_drawn: bool) -> None:
    generator = torch.Generator().manual_seed(steps)
    logits = torch.randn(60, steps + 1, 9, generator=generator)
    drafts = logits[:, :-1].argmax(2)
    wrong = torch.rand(60, steps, generator=generator) < 0.3
    drafts = torch.where(wrong, (drafts + 1) % 9, drafts)
    counts = torch.randint(0, steps + 1, (60,), generator=generator)
    settings = [Sampling()] * 60
    if among_drawn:
        settings[30:] = [Sampling(1.0)] * 30
    got = verify_drafts(logits, drafts, SamplingRows.of(settings), torch.arange(60), counts=counts)
    for i, s in enumerate(settings):
        tokens = [token for token in got.tokens[i].tolist() if token >= 0]
        assert len(tokens) == int(got.accepted[i]) + 1 <= int(counts[i]) + 1
        assert got.tokens[i, len(tokens) :].eq(-1).all()
        if s.temperature == 0:
            assert tokens == naive_greedy(logits[i], drafts[i].tolist(), int(counts[i]))


def test_a_draft_equal_to_the_target_in_distribution_is_always_kept() -> None:
    """p / q = 1 accepts whatever the number drawn, and then nothing may remain of max(p - q, 0)."""
    logits = torch.randn(500, 4, 11, generator=torch.Generator().manual_seed(3))
    rows = many(Sampling(0.8), 500)
    q = torch.stack([probabilities(logits[:, j], rows) for j in range(3)], dim=1)
    drafts = torch.stack([draw(q[:, j], rows, torch.arange(500) + j, purpose=DRAFT) for j in range(3)], dim=1)
    got = verify_drafts(logits, drafts, rows, torch.arange(500), counts=torch.full((500,), 3), draft_probs=q)
    assert got.accepted.eq(3).all()


def test_without_drafts_verification_is_sampling() -> None:
    logits = torch.randn(40, 3, 50, generator=torch.Generator().manual_seed(4))
    rows = SamplingRows.of(random_settings(40))
    positions = torch.arange(40) * 5
    want = sample(logits[:, 0], rows, positions)
    garbage = torch.full((40, 2), -7)
    got = verify_drafts(logits, garbage, rows, positions, counts=torch.zeros(40, dtype=torch.int64))
    assert torch.equal(got.tokens[:, 0], want)
    assert got.accepted.eq(0).all()
    assert torch.equal(
        verify_drafts(logits[:, :1], garbage[:, :0], rows, positions, counts=torch.zeros(40).long()).tokens[:, 0], want
    )


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows_n, vocab, steps = 29, 203, 3
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows_n, steps + 1, vocab, generator=generator) * 2
    settings = random_settings(rows_n)
    rows, positions = SamplingRows.of(settings), torch.randint(0, 2**20, (rows_n,), generator=generator)
    p = probabilities(logits[:, 0].clone(), rows)
    tokens = draw(p, rows, positions)
    q = torch.randn(rows_n, steps, vocab, generator=generator).softmax(2)
    drafts = torch.randint(0, vocab, (rows_n, steps), generator=generator)
    drafts[::2] = logits[::2, :-1].argmax(2)
    counts = torch.randint(0, steps + 1, (rows_n,), generator=generator)
    verified = verify_drafts(logits, drafts, rows, positions, counts=counts, draft_probs=q)
    scored = token_logprobs(logits[:, 0], tokens, 4)
    order = torch.randperm(rows_n, generator=generator)
    for batch in ([3], order[:7].tolist(), order.tolist()):
        own, at = SamplingRows.of([settings[i] for i in batch]), positions[batch]
        assert torch.equal(probabilities(logits[batch, 0], own), p[batch])
        assert torch.equal(draw(p[batch], own, at), tokens[batch])
        again = verify_drafts(logits[batch], drafts[batch], own, at, counts=counts[batch], draft_probs=q[batch])
        assert torch.equal(again.tokens, verified.tokens[batch])
        for made, want in zip(token_logprobs(logits[batch, 0], tokens[batch], 4), scored, strict=True):
            assert torch.equal(made, want[batch])


def test_logprobs_are_those_of_the_logits() -> None:
    logits = torch.randn(17, 40, generator=torch.Generator().manual_seed(6))
    ids = torch.arange(17) * 2
    got = token_logprobs(logits, ids, 6)
    want = logits.double().log_softmax(1)
    torch.testing.assert_close(got.chosen.double(), want[torch.arange(17), ids], atol=1e-6, rtol=0)
    best = want.topk(6)
    torch.testing.assert_close(got.logprobs.double(), best.values, atol=1e-6, rtol=0)
    assert torch.equal(got.ids, best.indices)
    assert [tuple(x.shape) for x in token_logprobs(logits, ids, 0)] == [(17,), (17, 0), (17, 0)]
    assert token_logprobs(logits, ids, 40).ids.sort().values.eq(torch.arange(40)).all()


def test_no_rows() -> None:
    rows, none = SamplingRows.of([]), torch.zeros(0, dtype=torch.int64)
    drawn = SamplingRows.of([Sampling(1.0, top_k=2)]).repeat(0)
    for settings in (rows, drawn):
        assert probabilities(torch.zeros(0, 5), settings).shape == (0, 5)
        assert sample(torch.zeros(0, 5), settings, none).shape == (0,)
        got = verify_drafts(torch.zeros(0, 4, 5), torch.zeros(0, 3).long(), settings, none, counts=none)
        assert got.tokens.shape == (0, 4)
    assert token_logprobs(torch.zeros(0, 5), none, 2).ids.shape == (0, 2)


def test_nothing_waits_for_a_value() -> None:
    """On the meta device there are no values: whatever asked for one would raise."""
    device = torch.device("meta")
    for settings in ([Sampling()] * 6, random_settings(6)):
        rows = SamplingRows.of(settings, device)
        logits, at = torch.empty(6, 4, 99, device=device), torch.empty(6, dtype=torch.int64, device=device)
        drafts = torch.empty(6, 3, dtype=torch.int64, device=device)
        for q in (None, torch.empty(6, 3, 99, device=device)):
            got = verify_drafts(logits, drafts, rows, at, counts=at, draft_probs=q)
            assert got.tokens.shape == (6, 4)
        assert sample(logits[:, 0], rows, at).shape == (6,)
        assert token_logprobs(logits[:, 0], at, 5).ids.shape == (6, 5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"request": 2**32}, "request=4294967296"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"temperature": True}, "temperature=True must be a number"),
        ({"top_p": "x"}, "top_p='x' must be a number"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows, at = many(Sampling(1.0), 3), torch.zeros(3, dtype=torch.int64)
    logits, drafts = torch.zeros(3, 3, 8), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="float64"):
        sample(logits[:, 0].double(), rows, at)
    with pytest.raises(ValueError, match="3 rows of logits, 2 of settings"):
        sample(logits[:, 0], many(Sampling(1.0), 2), at)
    for wrong in (drafts[:, :1], drafts[:2]):
        with pytest.raises(ValueError, match="do not fit logits"):
            verify_drafts(logits, wrong, rows, at, counts=at)
    with pytest.raises(ValueError, match=r"draft_probs .*\(3, 1, 8\)"):
        verify_drafts(logits, drafts, rows, at, counts=at, draft_probs=logits[:, :1])
    with pytest.raises(ValueError, match="2 settings"):
        verify_drafts(logits, drafts, many(Sampling(1.0), 2), at, counts=at)
    with pytest.raises(ValueError, match=r"must be Sampling, got \{'temperature': 1\.0\}"):
        SamplingRows.of([Sampling(), {"temperature": 1.0}])
    with pytest.raises(ValueError, match="n=9"):
        token_logprobs(logits[:, 0], at, 9)


def test_rows_know_what_work_they_need() -> None:
    flags = Counter()
    for settings in ([Sampling(top_k=5)], [Sampling(1.0)], [Sampling(1.0, top_k=5), Sampling()], []):
        rows = SamplingRows.of(settings)
        flags[rows.greedy, rows.truncated] += 1
        assert (rows.repeat(3).greedy, len(rows.repeat(3))) == (rows.greedy, 3 * len(rows))
    assert flags == {(True, False): 2, (False, False): 1, (False, True): 1}
    assert SamplingRows.of([Sampling(seed=1), Sampling(seed=2)]).repeat(2).seed.tolist() == [1, 1, 2, 2]
