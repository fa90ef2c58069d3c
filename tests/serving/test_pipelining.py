"""Steps launched before the ticket of the last one is read: what unread drafts may take is no reason to refuse."""

from __future__ import annotations

import pytest

from cptools import PoolExhausted
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_guessable, save_random

PROMPT, MOST = 10, 20


@pytest.fixture(scope="module", params=[save_random, save_guessable])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    """Drafts that are wrong, and drafts that are right now and then."""
    return GLM53.from_pretrained(request.param(tmp_path_factory.mktemp("tiny"), TINY), page_size=4)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_request_reaches_max_tokens_whatever_is_unread(model: GLM53, k: int, ahead: int) -> None:
    """In as many pages as the runner says that it takes, until the step that can not be."""
    cache = model.new_cache(model.kv.layout.pages(MOST + k))
    runner = ModelRunner(model, cache, max_requests=1, max_tokens=MOST, draft_tokens=k, steps_ahead=ahead)
    prompt = random_prompts((PROMPT,), TINY.vocab_size)[0]
    request = runner.open()
    tickets = [runner.step(prompts={request: prompt}, ending=[request])]
    got: list[int] = []
    refused = ""
    while not refused:
        try:
            tickets.append(runner.step(decodes=[request]))
        except ValueError as error:
            refused = str(error)
        if len(tickets) > ahead:
            got += tickets.pop(0).tokens()[request]
    assert f"cached tokens, max_tokens={MOST}" in refused
    for ticket in tickets:
        got += ticket.tokens()[request]
    reached = MOST - PROMPT + 1
    assert reached <= len(got) <= reached + k
    assert got[:reached] == model.generate_batch([prompt], reached).ids[0]


def test_pages_of_two_requests_suffice_although_tickets_are_unread(model: GLM53) -> None:
    """Each step would reserve for 8 tokens more a request and unread ticket; the pages are those of the tokens."""
    k, prompts = 7, random_prompts((5, 6), TINY.vocab_size)
    cache = model.new_cache(2 * model.kv.layout.pages(6 + 4 * (k + 1)))
    runner = ModelRunner(model, cache, max_requests=3, max_tokens=200, draft_tokens=k, steps_ahead=8)
    requests = [runner.open() for _ in prompts]
    tickets = [runner.step(prompts=dict(zip(requests, prompts, strict=True)), ending=requests)]
    tickets += [runner.step(decodes=requests) for _ in range(6)]
    got = {request: [token for ticket in tickets for token in ticket.tokens()[request]] for request in requests}
    for request, prompt in zip(requests, prompts, strict=True):
        assert got[request] == model.generate_batch([prompt], len(got[request])).ids[0]
    full = runner.open()
    with pytest.raises(PoolExhausted):
        runner.step(prompts={full: [1] * 150}, ending=[full])
