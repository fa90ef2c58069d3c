"""The model on a GPU, with whatever kernels serve its shapes there, against the CPU reference path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.glm53 import GLM53, GLM53Config
from tests.checkpoints import KDIM, TINY, random_prompts, save_random

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", [TINY, KDIM], ids=["tiny", "kdim"])
def test_prompts_and_decode_agree_with_the_cpu(tmp_path: Path, config: GLM53Config) -> None:
    """Another order of summation flips near-ties of a selection, and with one everything after it: such prompts are
    recognised by their selections and counted; few of these lengths may be lost to them."""
    path = save_random(tmp_path, config)
    prompts = random_prompts((1, 5, 17, 40, 64, 90, 130, 200), config.vocab_size)
    results = {}
    for device in ("cpu", "cuda"):
        model = GLM53.from_pretrained(path, device=device)
        results[device] = []
        for prompt in prompts:
            selections: list[torch.Tensor] = []

            def observe(layer, step, prompt_topk, decode_topk, selections=selections) -> None:
                selections.extend([prompt_topk.cpu().clone(), decode_topk.cpu().clone()])

            out = model.generate_batch([prompt], 4, prompt_logits="all", observer=observe)
            results[device].append((out, selections))
    rejected = 0
    for (cpu, chosen), (cuda, chosen_cuda) in zip(results["cpu"], results["cuda"], strict=True):
        if not all(torch.equal(a, b) for a, b in zip(chosen, chosen_cuda, strict=True)):
            rejected += 1
            continue
        assert cuda.ids == cpu.ids
        torch.testing.assert_close(cuda.prompt_logits[0].cpu(), cpu.prompt_logits[0], atol=1e-3, rtol=0)
        torch.testing.assert_close(cuda.decode_logits[0].cpu(), cpu.decode_logits[0], atol=1e-3, rtol=0)
    assert rejected <= 2, f"{rejected} of {len(prompts)} prompts select other positions"


def test_fp8_rows_in_bf16_are_as_near_to_fp32_as_on_the_cpu(tmp_path: Path) -> None:
    """What an engine runs: BF16, packed FP8 rows, the fast kernels. Against the fp32 model over the same rows' format,
    whose logits the CPU's own BF16 run misses by as much."""
    path = save_random(tmp_path, KDIM)
    prompts = random_prompts((1, 63, 200, 700), KDIM.vocab_size)
    want = GLM53.from_pretrained(path, kv_rows="fp8").generate_batch(prompts, 1, prompt_logits="all").prompt_logits
    runs = {}
    for device in ("cpu", "cuda"):
        model = GLM53.from_pretrained(path, device=device, dtype=torch.bfloat16, kv_rows="fp8")
        runs[device] = model.generate_batch(prompts, 1, prompt_logits="all").prompt_logits
    # Decode rows over the same contexts: the last token of each prompt as one.
    model = GLM53.from_pretrained(path, device="cuda", dtype=torch.bfloat16, kv_rows="fp8")
    cache = model.new_cache(32)
    requests = [cache.open() for _ in prompts]
    longer = {request: ids[:-1] for request, ids in zip(requests, prompts, strict=True) if len(ids) > 1}
    model.step(cache, prompts=longer)
    decoded = model.last_logits(model.step(cache, decodes={r: p[-1:] for r, p in zip(requests, prompts, strict=True)}))
    for number, exact in enumerate(want):
        cpu, cuda = ((runs[device][number].cpu() - exact).norm() / exact.norm() for device in ("cpu", "cuda"))
        assert cuda <= 1.5 * cpu + 1e-3, (number, cpu, cuda)
        last = (decoded[number].cpu() - exact[-1]).norm() / exact[-1].norm()
        assert last <= 3 * cpu + 1e-2, (number, cpu, last)
