"""The runner's graphs give the bits of the same functions run eagerly at the same padded shapes, and never wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cptools.kernels.sampling import Sampling
from models.glm53 import GLM53
from serving.engine import ModelRunner, TokenLogprob
from tests.checkpoints import KDIM, random_prompts, save_random

pytestmark = pytest.mark.gpu

SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamWaitEvent")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GLM53:
    path = save_random(tmp_path_factory.mktemp("kdim"), KDIM)
    return GLM53.from_pretrained(path, device="cuda", dtype=torch.bfloat16, kv_rows="fp8")


def runner_of(model: GLM53, *, graphs: bool, draft_tokens: int = 0) -> ModelRunner:
    cache = model.new_cache(160)
    cache.kv.mla_rows.pages.fill_(0xFF)
    cache.kv.index_rows.pages.fill_(0xFF)
    return ModelRunner(
        model,
        cache,
        max_requests=6,
        max_tokens=2048,
        batch_sizes=[2, 6],
        table_blocks=[8, 33],
        draft_tokens=draft_tokens,
        logprobs=4,
        graphs=graphs,
    )


def schedule(runner: ModelRunner, steps: int) -> Iterator[dict[int, list[TokenLogprob]]]:
    """Requests of random lengths come and go, some greedy, some drawn: the tokens of each step, one step late."""
    generator = torch.Generator().manual_seed(0)

    def below(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=generator))

    live: list[int] = []
    ticket = None
    for step in range(steps):
        while live and below(12) == 0:
            runner.close(live.pop(below(len(live))))
        decodes = [request for request in live if below(8)]
        prompts = {}
        if len(live) < 6 and (not live or below(6) == 0):
            settings = Sampling(), Sampling(0.8, seed=step), Sampling(1.1, top_k=20, top_p=0.9, seed=step)
            request = runner.open(settings[below(3) if step > 40 else 0])
            prompts[request] = random_prompts((1 + below(900),), 1024, seed=step)[0]
            live.append(request)
        following = runner.step(prompts=prompts, ending=list(prompts), decodes=decodes)
        if ticket is not None:
            yield ticket.logprobs()
        ticket = following
    assert ticket is not None
    yield ticket.logprobs()


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_graphs_equal_eager_steps_over_changing_batches(model: GLM53, draft_tokens: int) -> None:
    """100 steps with other lengths, batch sizes, page tables and settings of sampling at each."""
    captured, eager = (runner_of(model, graphs=graphs, draft_tokens=draft_tokens) for graphs in (True, False))
    for step, (one, other) in enumerate(zip(schedule(captured, 100), schedule(eager, 100), strict=True)):
        assert one == other, step
    for name in ("mla_rows", "index_rows"):
        assert torch.equal(getattr(captured.cache.kv, name).pages, getattr(eager.cache.kv, name).pages)
    assert torch.equal(captured.state.lengths, eager.state.lengths)
    assert torch.equal(captured.state.drafts[:-1], eager.state.drafts[:-1])


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_decode_steps_never_wait(model: GLM53, draft_tokens: int) -> None:
    runner = runner_of(model, graphs=True, draft_tokens=draft_tokens)
    prompts = random_prompts((5, 100, 640), 1024)
    requests = [runner.open() for _ in prompts]
    first = runner.step(prompts=dict(zip(requests, prompts, strict=True)), ending=requests)
    runner.step(decodes=requests).tokens()  # captured here
    first.tokens()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            tickets = [runner.step(decodes=requests) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    calls = [event.name for event in profile.events()]
    assert any("GraphLaunch" in name for name in calls), sorted(set(calls))
    found = [name for name in calls if name.startswith(SYNCS) and not name.startswith("cudaMemcpyAsync")]
    # The profiler itself waits for the device once, at its end.
    assert found.count("cudaDeviceSynchronize") <= 1
    assert [name for name in found if name != "cudaDeviceSynchronize"] == []
    assert all(len(ticket.tokens()) == 3 for ticket in tickets)
