"""The runner's padded, persistent buffers give what the plain loop over steps gives, on the CPU bit for bit."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cptools import PoolExhausted
from cptools.kernels.sampling import Sampling
from cptools.spans import no_span
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_random

LENGTHS = (1, 2, 17, 63, 64, 130)
NEW = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_random(tmp_path_factory.mktemp("tiny"), TINY), kv_rows="fp8")


def runner_of(model: GLM53, pages: int = 24, **options) -> ModelRunner:
    cache = model.new_cache(pages)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    return ModelRunner(model, cache, **{"max_requests": 8, "max_tokens": 300, **options})


def collect(into: dict[int, list[int]], ticket) -> None:
    for request, tokens in ticket.tokens().items():
        into.setdefault(request, []).extend(tokens)


@pytest.fixture(scope="module")
def want(model: GLM53) -> list[list[int]]:
    return model.generate_batch(random_prompts(LENGTHS, TINY.vocab_size), NEW).ids


@pytest.mark.parametrize("batch_sizes", [None, [6], [7, 8], [1, 3, 6]])
def test_padded_batches_equal_the_plain_loop(model: GLM53, want, batch_sizes) -> None:
    runner = runner_of(model, batch_sizes=batch_sizes)
    requests = [runner.open() for _ in LENGTHS]
    got: dict[int, list[int]] = {}
    prompts = dict(zip(requests, random_prompts(LENGTHS, TINY.vocab_size), strict=True))
    ticket = runner.step(prompts=prompts, ending=requests)
    for _ in range(NEW - 1):
        following = runner.step(decodes=requests)
        collect(got, ticket)
        ticket = following
    collect(got, ticket)
    assert [got[request] for request in requests] == want


def test_requests_come_and_go_in_chunks_and_in_any_order(model: GLM53, want) -> None:
    """Prompts in chunks of 40 beside decoding requests; one is closed as soon as it has its tokens; the batch size
    changes at almost every step, and rows and pages are used again."""
    runner = runner_of(model, pages=11, max_requests=3, table_blocks=[1, 2, 5])
    waiting = list(enumerate(random_prompts(LENGTHS, TINY.vocab_size)))
    fed: dict[int, int] = {}
    number: dict[int, int] = {}
    left: dict[int, int] = {}
    got: dict[int, list[int]] = {}
    ticket = None
    while waiting or number:
        while waiting and len(number) < 3:
            request = runner.open()
            number[request], fed[request] = waiting[-1][0], 0
            waiting.pop()
        prompts, ending = {}, []
        for request in number:
            ids = random_prompts(LENGTHS, TINY.vocab_size)[number[request]]
            if fed[request] < len(ids):
                prompts[request] = ids[fed[request] : fed[request] + 40]
                fed[request] += len(prompts[request])
                if fed[request] == len(ids):
                    ending.append(request)
        decodes = [request for request in reversed(number) if request in left and left[request] > 0]
        following = runner.step(prompts=prompts, ending=ending, decodes=decodes)
        for request in decodes:
            left[request] -= 1
        left.update(dict.fromkeys(ending, NEW - 1))
        if ticket is not None:
            collect(got, ticket)
        ticket = following
        for request in [r for r in number if left.get(r) == 0]:
            runner.close(request)
            assert want[number.pop(request)][: len(got[request])] == got[request]
            del left[request]
    collect(got, ticket)
    assert sorted(map(tuple, got.values())) == sorted(map(tuple, want))
    assert runner.cache.tables.allocator.num_free == 11


def test_draws_depend_on_the_request_alone(model: GLM53) -> None:
    """Alone or in a batch of greedy, drawn and truncated rows, in another order: the same draws."""
    settings = [Sampling(), Sampling(0.9, seed=3), Sampling(1.2, top_k=7, seed=3, request=1), Sampling(0.7, top_p=0.8)]
    prompts = random_prompts((5, 40, 64, 9), TINY.vocab_size)

    def run(chosen: list[int]) -> dict[int, list[int]]:
        runner = runner_of(model)
        requests = {i: runner.open(settings[i]) for i in chosen}
        got: dict[int, list[int]] = {}
        collect(got, runner.step(prompts={requests[i]: prompts[i] for i in chosen}, ending=list(requests.values())))
        for _ in range(5):
            collect(got, runner.step(decodes=[requests[i] for i in chosen]))
        return {i: got[request] for i, request in requests.items()}

    together = run([2, 0, 3, 1])
    assert len({tuple(ids) for ids in together.values()}) == 4
    for i in range(4):
        assert run([i])[i] == together[i]


def test_tokens_are_there_although_many_steps_were_launched_ahead(model: GLM53) -> None:
    runner = runner_of(model, steps_ahead=2)
    request = runner.open()
    prompt = random_prompts((17,), TINY.vocab_size)[0]
    tickets = [runner.step(prompts={request: prompt}, ending=[request])]
    tickets += [runner.step(decodes=[request]) for _ in range(7)]
    got = [ticket.tokens()[request][0] for ticket in tickets]
    assert got == model.generate(prompt, 8)
    assert all(ticket.ready() for ticket in tickets)


def test_pages_reserved_ahead_reach_the_table(model: GLM53) -> None:
    runner = runner_of(model)
    request = runner.open()
    prompt = random_prompts((60,), TINY.vocab_size)[0]
    got: dict[int, list[int]] = {}
    collect(got, runner.step(prompts={request: prompt}, ending=[request]))
    runner.cache.tables.reserve({request: 250})
    for _ in range(11):
        collect(got, runner.step(decodes=[request]))
    assert got[request] == model.generate(prompt, 12)


def test_refused_steps_change_nothing(model: GLM53) -> None:
    runner = runner_of(model, pages=3, max_requests=2, max_tokens=130)
    one, two = runner.open(), runner.open()
    with pytest.raises(ValueError, match="max_requests=2 requests are open"):
        runner.open()
    ids = random_prompts((64,), TINY.vocab_size)[0]
    for arguments, message in (
        ({"decodes": [one]}, "have no token to decode from"),
        ({"prompts": {one: ids}, "ending": [two]}, "are ending, but have no prompt"),
        ({"prompts": {one: ids}, "decodes": [one]}, "stands twice"),
        ({"prompts": {one: ids * 3}}, "192} cached tokens, max_tokens=130"),
        ({"prompts": {99: ids}}, r"requests \[99\] are not open"),
        ({"prompts": {one: [TINY.vocab_size]}}, "vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.step(**arguments)
    first = runner.step(prompts={one: ids}, ending=[one]).tokens()[one]
    with pytest.raises(PoolExhausted):
        runner.step(prompts={two: ids * 2}, decodes=[one])
    with pytest.raises(ValueError, match="decode already"):
        runner.step(prompts={one: ids})
    assert runner.cache.lengths == {one: 64, two: 0}
    assert first + runner.step(decodes=[one]).tokens()[one] == model.generate(ids, 2)


def test_sizes_that_do_not_fit_are_refused(model: GLM53) -> None:
    for options, message in (
        ({"max_tokens": 4097}, r"max_tokens=4097 is outside \[1, 4096\]"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"table_blocks": [1, 2]}, r"table_blocks=\[1, 2\] must be sizes >= 1 that reach 5"),
        ({"batch_sizes": [0, 4]}, "batch_sizes=0"),
        ({"graphs": True}, "can not be captured"),
    ):
        with pytest.raises(ValueError, match=message):
            runner_of(model, **options)


def test_padding_leaves_its_row_as_it_was(model: GLM53) -> None:
    runner = runner_of(model, batch_sizes=[8])
    request = runner.open()
    runner.step(prompts={request: [1, 2, 3]}, ending=[request])
    runner.step(decodes=[request])
    state = runner.state
    assert state.lengths[state.padding] == -1
    assert (state.tables[state.padding] == -1).all()
    assert torch.equal(state.lengths[:1], torch.tensor([4]))


def test_spans_name_every_part_and_close(model: GLM53) -> None:
    open_now: list[str] = []
    seen: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def span(name: str):
        open_now.append(name)
        seen.append(tuple(open_now))
        yield
        assert open_now.pop() == name

    runner = runner_of(model, span=span)
    request = runner.open()
    model.span = span
    try:
        runner.step(prompts={request: [1, 2, 3]}, ending=[request])
        runner.step(decodes=[request])
    finally:
        model.span = no_span
    assert open_now == []
    layers = range(TINY.num_hidden_layers)
    full = [kind == "full" for kind in TINY.indexer_types]
    for step in ("prompts", "decode 1"):
        parts = [path for path in seen if path[0] == step]
        for name in ("new rows", "context", "queries", "attend", "output", "feed forward"):
            assert parts.count((step, "layer 0", name)) == 1
            assert len([path for path in parts if path[-1] == name]) == len(layers), name
        assert [(step, f"layer {i}", "select") in parts for i in layers] == full


def test_what_a_graph_reads_stays_where_it_is(model: GLM53) -> None:
    """Field case B12: no step may put a length, a table or a token into new memory, whose old address is captured."""
    runner = runner_of(model, batch_sizes=[2, 4])

    def addresses() -> list[int]:
        state = runner.state
        settings = state.sampling(torch.tensor([0]), greedy=False, truncated=True)
        assert len(settings) == 1
        held = [state.tokens, state.lengths, state.tables, state.drafts]
        pages = [runner.cache.kv.mla_rows.pages, runner.cache.kv.index_rows.pages]
        return [x.data_ptr() for x in held + pages]

    before = addresses()
    requests = [runner.open(Sampling(0.5)) for _ in range(3)]
    prompts = random_prompts((100, 63, 5), TINY.vocab_size)
    runner.step(prompts=dict(zip(requests, prompts, strict=True)), ending=requests)
    for _ in range(30):
        runner.step(decodes=requests)
    runner.close(requests[1])
    again = runner.open()
    runner.step(prompts={again: prompts[2]}, ending=[again], decodes=[requests[0]])
    assert addresses() == before
    assert [runner.cache.lengths[r] for r in (requests[0], again)] == [131, 5]
