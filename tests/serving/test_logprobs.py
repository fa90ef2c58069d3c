"""Log-probabilities of the runner, against the softmax of the model's own logits."""

from __future__ import annotations

import pytest
import torch

from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from serving.engine import ModelRunner
from tests.checkpoints import TINY, random_prompts, save_random

LENGTHS = (1, 63, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    return GLM53.from_pretrained(save_random(tmp_path_factory.mktemp("tiny"), TINY))


@pytest.mark.parametrize(("draft_tokens", "n"), [(0, 0), (0, 5), (3, 3)])
def test_logprobs_are_those_of_the_logits(model: GLM53, draft_tokens: int, n: int) -> None:
    """Prefilling a prompt and its tokens gives the logits that each was chosen from, whatever was drafted."""
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    cache = model.new_cache(12)
    sizes = {"max_requests": 4, "max_tokens": 200, "batch_sizes": [4]}
    runner = ModelRunner(model, cache, **sizes, draft_tokens=draft_tokens, logprobs=n)
    requests = [runner.open(s) for s in (Sampling(), Sampling(0.9, seed=3), Sampling())]
    tickets = [runner.step(prompts=dict(zip(requests, prompts, strict=True)), ending=requests)]
    tickets += [runner.step(decodes=requests) for _ in range(3)]
    for prompt, request in zip(prompts, requests, strict=True):
        made = [entry for ticket in tickets for entry in ticket.logprobs()[request]]
        tokens = [token for ticket in tickets for token in ticket.tokens()[request]]
        assert [entry.token for entry in made] == tokens
        logits = model.prefill_logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        want = torch.log_softmax(logits.double(), dim=1)
        for row, entry in enumerate(made):
            assert entry.logprob == pytest.approx(want[row, entry.token].item(), abs=1e-4)
            best = want[row].topk(n)
            assert [token for token, _ in entry.best] == best.indices.tolist()
            assert [value for _, value in entry.best] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_without_them_there_are_none(model: GLM53) -> None:
    runner = ModelRunner(model, model.new_cache(2), max_requests=1, max_tokens=64)
    request = runner.open()
    ticket = runner.step(prompts={request: [1, 2]}, ending=[request])
    assert ticket.logprobs() == {request: []}
    assert len(ticket.tokens()[request]) == 1
    with pytest.raises(ValueError, match="logprobs=-1"):
        ModelRunner(model, model.new_cache(2), max_requests=1, max_tokens=64, logprobs=-1)
