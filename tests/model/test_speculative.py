"""Drafts of the MTP layer change no greedy token, and no row of a rejected one is ever read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cptools.cp_kv import ContextParallelKV
from cptools.kernels.sampling import Sampling, SamplingRows, verify_drafts
from cptools.step_rows import DecodeRows
from models.glm53 import GLM53
from models.glm53.speculative import (
    Continuing,
    Drafts,
    DraftStart,
    continue_drafts,
    draft,
    draft_decode,
    synthetic_acceptance_rate,
    verify,
    verify_synthetic,
)
from tests.checkpoints import TINY, random_prompts, save_guessable, save_random
from tests.chi_square import SIGNIFICANCE, histogram, p_value
from tests.model.rounds import Rounds

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_guessable(tmp_path_factory.mktemp("guessable"), TINY)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> GLM53:
    return GLM53.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def unguessable(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    """Its MTP layer weighs everything it gets, so that its drafts show any difference; none is ever accepted."""
    return GLM53.from_pretrained(save_random(tmp_path_factory.mktemp("random"), TINY))


def without_index_share(model: GLM53, **options) -> GLM53:
    config = dataclasses.replace(model.config, index_share_for_mtp_iteration=False)
    return GLM53(config, model.weights, cp=model.cp, kv=model.kv, **options)


def test_three_drafts_change_nothing_on_50_prompts(model: GLM53) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (*LENGTHS, *torch.randint(1, 70, (40,), generator=generator).tolist())
    prompts = random_prompts(lengths, TINY.vocab_size)
    plain = model.generate_batch(prompts, 14, prompt_logits="all")
    drafted = model.generate_batch(prompts, 14, prompt_logits="all", draft_tokens=3)
    assert drafted.ids == plain.ids
    for name in ("prompt_logits", "decode_logits"):
        assert all(map(torch.equal, getattr(drafted, name), getattr(plain, name))), name
    # Every length of acceptance was met, and rows given up are accounted for.
    assert min(drafted.accepted) > 20
    assert (plain.accepted, plain.mean_acceptance_length) == ([50 * 13], 1.0)
    assert 0 <= sum((1 + j) * n for j, n in enumerate(drafted.accepted)) - 50 * 13 <= 50 * 3
    assert drafted.traffic.rows_stored - drafted.traffic.rows_dropped == plain.traffic.rows_stored
    assert not drafted.synthetic
    assert not plain.synthetic


@pytest.mark.parametrize(("k", "share"), [(1, True), (2, False), (4, True), (6, False)])
def test_any_number_of_query_rows(model: GLM53, k: int, share: bool) -> None:
    """Field case D15: 2, 3, 5, 7 rows a request (and 4 elsewhere)."""
    subject = model if share else without_index_share(model)
    prompts = random_prompts((1, 16, 17, 70), TINY.vocab_size)
    plain = subject.generate_batch(prompts, 12)
    drafted = subject.generate_batch(prompts, 12, draft_tokens=k, chunk=23)
    assert drafted.ids == plain.ids
    assert all(map(torch.equal, drafted.decode_logits, plain.decode_logits))
    assert sum(drafted.accepted[1:]) > 0


@pytest.mark.parametrize("kv_rows", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("decode_parts", [1, 3])
def test_row_formats_and_parts(checkpoint: Path, kv_rows: str, decode_parts: int) -> None:
    model = GLM53.from_pretrained(checkpoint, kv_rows=kv_rows, decode_parts=decode_parts, page_size=8, interleave=2)
    prompts = random_prompts((5, 21), TINY.vocab_size)
    plain, drafted = (model.generate_batch(prompts, 12, draft_tokens=k) for k in (0, 3))
    assert drafted.ids == plain.ids
    assert sum(drafted.accepted[1:]) > 0


def test_contexts_around_a_key_tile_and_the_true_top_k(model: GLM53) -> None:
    """Field case D17: the steps cross 512 keys, a tile of the indexer, and 2047 to 2049 positions."""
    prompts = random_prompts((510, 2045), TINY.vocab_size)
    plain, drafted = (model.generate_batch(prompts, 6, draft_tokens=k) for k in (0, 3))
    assert drafted.ids == plain.ids
    assert all(map(torch.equal, drafted.decode_logits, plain.decode_logits))


def test_generate_with_drafts_stops_after_eos(model: GLM53) -> None:
    """Also where an accepted draft is the eos and others were accepted behind it."""
    prompts = random_prompts((20, 9), TINY.vocab_size)
    stopped = 0
    for prompt in prompts:
        free = model.generate(prompt, 12)
        assert model.generate(prompt, 12, draft_tokens=3) == free
        for end in (1, 2, 3, 6):
            config = dataclasses.replace(TINY, eos_token_ids=(free[end],))
            stopping = GLM53(config, model.weights, cp=model.cp, kv=model.kv)
            plain = stopping.generate_batch([prompt], 12, stop_at_eos=True)
            drafted = stopping.generate_batch([prompt], 12, stop_at_eos=True, draft_tokens=3)
            assert drafted.ids == plain.ids == [free[: free.index(free[end]) + 1]]
            assert torch.equal(drafted.decode_logits[0], plain.decode_logits[0])
            stopped += sum(drafted.accepted[1:]) > 0
    assert stopped


def test_drafts_do_not_depend_on_batch_or_chunks(unguessable: GLM53) -> None:
    model = unguessable
    prompts = random_prompts((1, 2, 17, 31, 64), TINY.vocab_size)
    together = Rounds(model, prompts, 3)
    chunked = Rounds(model, prompts, 3, chunk=7)
    for _ in range(2):
        assert chunked.drafts == together.drafts
        together.round()
        chunked.round()
    for i, prompt in enumerate(prompts):
        alone = Rounds(model, [prompt], 3)
        alone.round()
        alone.round()
        assert (alone.ids[0], alone.drafts[0]) == (together.ids[i], together.drafts[i])


def claimed(truth: list[int], done: int, right: int, k: int) -> list[int]:
    """Drafts of which the first ``right`` are the tokens to come, and the rest are not."""
    return [(token + (j >= right)) % TINY.vocab_size for j, token in enumerate(truth[done : done + k])]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("lost", ["swap", "recompute"])
def test_no_row_of_a_rejected_draft_is_read(unguessable: GLM53, share: bool, lost: str) -> None:
    """3, 1, 0 and 2 accepted drafts in turn, NaN in every row behind the lengths, and requests that lose their pages.

    Tokens and logits are those of plain decoding, and drafts those of a prompt of all these tokens: what rounds leave
    in the MTP layer's cache is what a prompt makes there.
    """
    model = unguessable if share else without_index_share(unguessable)
    prompts = random_prompts((1, 16, 61), TINY.vocab_size)
    truth = model.generate_batch(prompts, 16)
    rounds = Rounds(model, prompts, 3)
    for turn in range(5):
        rounds.poison()
        if turn % 2:
            getattr(rounds, lost)()
            rounds.poison()
        rights = [(3, 1, 0, 2)[(turn + i) % 4] for i in range(3)]
        rounds.round([claimed(truth.ids[i], len(rounds.ids[i]), rights[i], 3) for i in range(3)])
        assert rounds.accepted == rights
        for i, ids in enumerate(rounds.ids):
            assert ids == truth.ids[i][: len(ids)]
            assert torch.equal(torch.stack(rounds.logits[i][1:]), truth.decode_logits[i][: len(ids) - 1])
        fresh = Rounds(model, [rounds.known(i)[:-1] for i in range(3)], 3)
        assert rounds.drafts == fresh.drafts


def test_a_rejected_row_that_counts_is_noticed(unguessable: GLM53) -> None:
    """The test above can fail: a cache that keeps a rejected token in its length gives other logits."""
    model = unguessable
    prompts = random_prompts((16,), TINY.vocab_size)
    truth = model.generate_batch(prompts, 8)
    rounds = Rounds(model, prompts, 3)
    rounds.round([claimed(truth.ids[0], 1, 1, 3)])
    rounds.cache.lengths[rounds.requests[0]] += 1
    rounds.round([claimed(truth.ids[0], 3, 3, 3)])
    assert not torch.equal(rounds.logits[0][3], truth.decode_logits[0][2])


def test_block_tables_of_every_draft_step_are_those_of_its_requests(model: GLM53, monkeypatch) -> None:
    """Field case A19: later drafts over tables of zeros. Requests whose pages lie among each other's."""
    rounds = Rounds(model, random_prompts((200, 70, 130), TINY.vocab_size), 4, chunk=64)
    seen = []
    begin = ContextParallelKV.begin_decode

    def record(cache, rows):
        seen.append(rows.tables)
        return begin(cache, rows)

    monkeypatch.setattr(ContextParallelKV, "begin_decode", record)
    rounds.round()
    want = rounds.cache.tables.table(rounds.requests)
    assert len(seen) == 3
    assert want.unique().numel() > 8
    for tables in seen:
        assert torch.equal(tables, want)


@pytest.mark.parametrize("share", [True, False])
def test_padding_among_draft_rows_changes_nothing(unguessable: GLM53, share: bool) -> None:
    """Field cases A21 and B12, as far as a CPU goes: buffers of one size, refilled, with idle requests among others."""
    subject = unguessable if share else without_index_share(unguessable)
    size, k = 4, 4
    hidden, width = subject.config.hidden_size, subject.config.index_topk
    start = DraftStart(
        hidden=torch.zeros(size, hidden),
        selected=torch.full((size, width), -1),
        positions=torch.full((size,), -1),
        tables=torch.full((size, 3), -1),
    )
    rounds = Rounds(subject, random_prompts((9, 100), TINY.vocab_size), k)
    cache = rounds.cache.kv

    def drafts(given: DraftStart) -> torch.Tensor:
        rows = len(given.positions)
        settings, split = SamplingRows.of([Sampling()] * rows), subject.split.begin_decode(rows)
        return continue_drafts(subject, cache, split, given, settings, draft_tokens=k).tokens

    pages = cache.mla_rows.pages.clone()
    drafts(start)
    assert torch.equal(pages, cache.mla_rows.pages)  # idle requests alone store nothing

    generator = torch.Generator().manual_seed(0)
    tables = rounds.cache.tables.table(rounds.requests)
    for turn in range(5):
        positions = torch.tensor([8, 99]) - turn
        given = DraftStart(
            hidden=torch.randn(2, hidden, generator=generator),
            selected=torch.where(torch.arange(width) <= positions.unsqueeze(1), torch.arange(width), -1),
            positions=positions,
            tables=tables,
        )
        places = torch.tensor([1, 3] if turn % 2 else [2, 0])
        for name, rows in vars(given).items():
            buffer = getattr(start, name)
            buffer.fill_(-1)
            if rows.dim() == 1:
                buffer[places] = rows
            else:
                buffer[places, : rows.shape[1]] = rows
        assert torch.equal(drafts(start)[places], drafts(given))


@pytest.mark.parametrize("share", [True, False])
def test_rounds_of_device_rows_are_those_of_steps(unguessable: GLM53, share: bool) -> None:
    """`decode_hidden` and `draft_decode`, with an idle request among others, against `step` and `draft`."""
    model = unguessable if share else without_index_share(unguessable)
    prompts = random_prompts((30, 5), TINY.vocab_size)
    truth = model.generate_batch(prompts, 8)
    stepped, rounds = Rounds(model, prompts, 3), Rounds(model, prompts, 3)
    for right in (1, 3):
        cache = rounds.cache
        # Steps reserve for themselves: pages for what is fed, and for the rows of draft steps.
        held = {request: cache.lengths[request] + 4 + 2 for request in rounds.requests}
        cache.tables.reserve(held)
        claims = [claimed(truth.ids[i], len(rounds.ids[i]), right, 3) for i in range(2)]
        stepped.round(claims)

        contexts = torch.tensor([cache.lengths[rounds.requests[0]], -1, cache.lengths[rounds.requests[1]]])
        tables = torch.full((3, 2), -1)
        tables[[0, 2]] = torch.nn.functional.pad(cache.tables.table(rounds.requests), (0, 2), value=-1)[:, :2]
        rows = DecodeRows.of_buffers(model.kv, contexts, tables, per_request=4)
        fed = torch.tensor([[rounds.ids[0][-1], *claims[0]], [0] * 4, [rounds.ids[1][-1], *claims[1]]])
        hidden = model.decode_hidden(cache.kv, rows, fed.flatten())
        greedy = SamplingRows.of([Sampling()] * 3)
        counts = torch.tensor([3, 0, 3])
        logits = model.logits(hidden).unflatten(0, (3, 4))
        verified = verify_drafts(logits, fed[:, 1:], greedy, contexts + 1, counts=counts)
        drafts = draft_decode(model, cache.kv, rows, hidden, verified, greedy).tokens
        for i, place in enumerate((0, 2)):
            rounds.ids[i] += [token for token in verified.tokens[place].tolist() if token >= 0]
            cache.lengths[rounds.requests[i]] += int(verified.accepted[place]) + 1
        assert verified.accepted.tolist() == [right, 0, right]
        assert rounds.ids == stepped.ids
        assert drafts[[0, 2]].tolist() == stepped.drafts


def test_short_prompts_on_the_dense_path_draft_alike(model: GLM53, unguessable: GLM53) -> None:
    """It selects nothing, but draft steps that share its selection see all of the prompt."""
    prompts = random_prompts((1, 5, 16, 17), TINY.vocab_size)
    for subject in (unguessable, model):
        dense = GLM53(TINY, subject.weights, cp=subject.cp, kv=subject.kv, sparse_mla_force_mqa=False)
        assert Rounds(dense, prompts, 3).drafts == Rounds(subject, prompts, 3).drafts
    assert dense.generate_batch(prompts, 9, draft_tokens=3).ids == dense.generate_batch(prompts, 9).ids


def test_pages_of_a_batch_suffice_for_its_drafts(model: GLM53) -> None:
    """No page more than without: up to the last position that the configuration allows."""
    for subject in (model, without_index_share(model)):
        for length in (60, 63):
            prompt = random_prompts((length,), TINY.vocab_size)
            cache = subject.new_cache(subject.kv.layout.pages(length + 5))
            drafted = subject.generate_batch(prompt, 6, draft_tokens=3, cache=cache)
            assert drafted.ids == subject.generate_batch(prompt, 6).ids
            assert cache.tables.allocator.num_free == cache.tables.allocator.num_pages
    last = dataclasses.replace(TINY, max_position_embeddings=70)
    ending = GLM53(last, model.weights, cp=model.cp, kv=model.kv)
    prompt = random_prompts((64,), TINY.vocab_size)
    assert ending.generate_batch(prompt, 7, draft_tokens=3).ids == ending.generate_batch(prompt, 7).ids


def test_sampling_with_drafts_keeps_the_distribution(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, vocab_size=8)
    model = GLM53.from_pretrained(save_guessable(tmp_path, config, doubt=0.3))
    count, prompt, temperature = 300, [3, 1, 4], 1.5

    def chances(prompts: list[list[int]]) -> torch.Tensor:
        logits = model.generate_batch(prompts, 1).prompt_logits
        return (torch.cat(logits) / temperature).softmax(1)

    # The distribution of the third new token, over all pairs before it.
    pairs = [[a, b] for a in range(8) for b in range(8)]
    first = chances([prompt])[0]
    second = chances([[*prompt, a] for a in range(8)])
    third = chances([[*prompt, *pair] for pair in pairs])
    joint = torch.stack([first[a] * second[a, b] for a, b in pairs])
    exact = [first, first @ second, joint @ third]

    settings = [Sampling(temperature, seed=7, request=i) for i in range(count)]
    for options in ({}, {"most_likely_drafts": True}):
        out = model.generate_batch([prompt] * count, 3, sampling=settings, draft_tokens=2, **options)
        assert out.accepted[1] > 30
        tokens = torch.tensor(out.ids)
        for place in range(3):
            assert p_value(histogram(tokens[:, place], 8), exact[place]) > SIGNIFICANCE, (options, place)
    # Drafts that are believed too often show.
    out = model.generate_batch(
        [prompt] * count,
        3,
        sampling=settings,
        draft_tokens=2,
        most_likely_drafts=True,
        synthetic_acceptance_length=2.9,
    )
    assert out.synthetic
    assert p_value(histogram(torch.tensor(out.ids)[:, 1], 8), exact[1]) < SIGNIFICANCE


def test_drawn_tokens_do_not_depend_on_the_batch(model: GLM53) -> None:
    prompts = random_prompts((5, 30, 17), TINY.vocab_size)
    settings = [Sampling(0.3, seed=1), Sampling(0.3, top_k=5, seed=1), Sampling(0.3, top_p=0.9, seed=2, request=4)]
    together = model.generate_batch(prompts, 10, sampling=settings, draft_tokens=3)
    for i in range(3):
        alone = model.generate_batch([prompts[i]], 10, sampling=settings[i], draft_tokens=3, chunk=4)
        assert alone.ids == [together.ids[i]]
    assert model.generate_batch(prompts, 10, sampling=Sampling(0.3, seed=3), draft_tokens=3).ids != together.ids


def test_synthetic_acceptance_has_the_mean_that_was_asked_for(model: GLM53) -> None:
    for k, length in ((3, 2.99), (3, 1.0), (3, 4.0), (5, 3.5), (1, 1.2)):
        rate = synthetic_acceptance_rate(length, k)
        assert abs(sum(rate**i for i in range(k + 1)) - length) < 1e-9
        rows = 4000
        drafts = Drafts(torch.full((rows, k), 5))
        counts = torch.full((rows,), k)
        index = torch.arange(rows * (k + 1)).view(rows, k + 1)
        continuing = Continuing((), index, counts, torch.arange(rows) * 10)
        logits = torch.nn.functional.one_hot(torch.arange(rows * (k + 1)) % 7, 7).float()
        got = verify_synthetic(logits, continuing, drafts, SamplingRows.of([Sampling()] * rows), rate)
        chances = torch.tensor([rate**j * (1 - rate) for j in range(k)] + [rate**k])
        assert p_value(histogram(got.accepted, k + 1), chances) > SIGNIFICANCE
        own = got.tokens.gather(1, got.accepted.unsqueeze(1)).squeeze(1)
        assert torch.equal(own, (index[:, 0] + got.accepted) % 7)
    out = model.generate_batch(
        random_prompts((4, 9), TINY.vocab_size), 30, draft_tokens=3, synthetic_acceptance_length=4
    )
    assert out.synthetic
    assert out.accepted[3] >= 2 * 7


@pytest.mark.parametrize(
    "options, message",
    [
        ({"draft_tokens": -1}, "draft_tokens=-1"),
        ({"draft_tokens": 1.5}, "draft_tokens=1.5"),
        ({"synthetic_acceptance_length": 2.0}, "no drafts"),
        ({"most_likely_drafts": True}, "no drafts"),
        ({"draft_tokens": 3, "synthetic_acceptance_length": 4.5}, r"4.5 is outside \[1, 4\]"),
        ({"draft_tokens": 3, "synthetic_acceptance_length": 0.5}, r"0.5 is outside \[1, 4\]"),
        ({"sampling": [Sampling()] * 2}, "2 sampling settings for 1 prompts"),
    ],
)
def test_bad_options_are_refused(model: GLM53, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[1, 2]], 2, **options)


def test_drafts_need_an_mtp_layer(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, num_nextn_predict_layers=0, index_share_for_mtp_iteration=False)
    model = GLM53.from_pretrained(save_random(tmp_path, config))
    with pytest.raises(ValueError, match="no MTP layer"):
        model.generate([1], 2, draft_tokens=3)


def test_truncation_is_checked_and_keeps_the_pages(model: GLM53) -> None:
    cache = model.new_cache(3)
    request = cache.open()
    model.step(cache, prompts={request: [5] * 70})
    for length, message in ((71, "has 70 tokens"), (-1, "cut to -1"), (1.5, "1.5")):
        with pytest.raises(ValueError, match=message):
            cache.truncate(request, length)
    with pytest.raises(ValueError, match="request 9 is not open"):
        cache.truncate(9, 0)
    assert cache.lengths == {request: 70}
    cache.truncate(request, 3)
    assert (cache.lengths[request], cache.tables.allocator.num_free) == (3, 1)
    assert cache.kv.traffic.rows_dropped == 67
    cache.close(request)
    assert cache.tables.allocator.num_free == 3


def test_draft_checks_what_it_is_given(model: GLM53) -> None:
    cache = model.new_cache(2)
    request = cache.open()
    result = model.step(cache, prompts={request: [1, 2, 3]})
    greedy = SamplingRows.of([Sampling()])
    continuing = Continuing.of(result.plan, [0], 2)
    verified = verify(model.last_logits(result), continuing, Drafts(torch.zeros(1, 2).long()), greedy)
    with pytest.raises(ValueError, match="2 next_ids for 3 prompt tokens"):
        draft(model, result, continuing, verified, [2, 3], greedy, draft_tokens=2)
    with pytest.raises(ValueError, match="draft_tokens=0"):
        draft(model, result, continuing, verified, [2, 3, 0], greedy, draft_tokens=0)
    cache.truncate(request, 2)
    with pytest.raises(ValueError, match="left its requests at"):
        draft(model, result, continuing, verified, [2, 3, 0], greedy, draft_tokens=2)
    step = model.step(cache, decodes={request: [1, 2, 3, 4]})
    with pytest.raises(ValueError, match=r"\(4,\) rows; draft_tokens=2 allows 1 to 3"):
        Continuing.of(step.plan, [], 2)
