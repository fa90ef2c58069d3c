"""Another implementation agrees: transformers, on random models of the released layout. See tests.oracle.builder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cptools.step_plan import StepPlan
from models.glm53 import GLM53
from tests.model.rounds import Rounds
from tests.oracle.case import OracleCase, oracle_case

ATOL = 1e-4
CASES = [
    pytest.param((preset, fp8, seed), id=f"{preset}-{'fp8' if fp8 else 'fp32'}-seed{seed}", marks=marks)
    for seed, marks in [(0, ()), (1, pytest.mark.long), (2, pytest.mark.long)]
    for preset in ("tiny", "kdim")
    for fp8 in (False, True)
]
PROMPTS = range(4)


@dataclass(frozen=True)
class Subject:
    model: GLM53
    oracle: OracleCase

    def expected(self, prompt: int, name: str) -> Tensor:
        return self.oracle.tensors[f"p{prompt}.{name}"]


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    preset, fp8, seed = request.param
    oracle = oracle_case(tmp_path_factory, preset, fp8=fp8, seed=seed)
    return Subject(GLM53.from_pretrained(oracle.path), oracle)


def test_the_oracle_is_decided(subject: Subject) -> None:
    """Its prompts hold no ties, and transformers with a cache agrees with itself without one."""
    for result in subject.oracle.results:
        assert result["cache_equals_no_cache"], result
        assert result["topk_exact_ties"] == 0, result
        gaps = [result[name] for name in ("min_topk_gap", "min_router_gap", "min_greedy_gap")]
        assert min(gap for gap in gaps if gap is not None) > 1e-6, result


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_of_a_prompt(subject: Subject, prompt: int) -> None:
    logits = subject.model.prefill_logits(subject.oracle.prompts[prompt])
    torch.testing.assert_close(logits, subject.expected(prompt, "logits"), atol=ATOL, rtol=0)


def test_selection_of_every_layer(subject: Subject) -> None:
    """All prompts as one batch: prompt rows in packed order."""
    seen: dict[int, Tensor] = {}

    def observe(layer: int, step: StepPlan, prompt_topk: Tensor, decode_topk: Tensor) -> None:
        seen[layer] = prompt_topk.clone()

    subject.model.generate_batch(subject.oracle.prompts, 1, observer=observe)
    assert sorted(seen) == list(range(subject.model.config.num_hidden_layers))
    for layer, topk in seen.items():
        expected = torch.cat([subject.expected(prompt, f"layer{layer}.topk") for prompt in PROMPTS])
        wrong = (topk != expected).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, f"layer {layer}: packed rows {wrong} of {len(topk)} select other positions"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation(subject: Subject, prompt: int) -> None:
    result = subject.oracle.results[prompt]
    assert subject.model.generate(subject.oracle.prompts[prompt], 16) == result["greedy"]


def test_decode_logits_of_a_batch(subject: Subject) -> None:
    out = subject.model.generate_batch(subject.oracle.prompts, 16)
    for prompt in PROMPTS:
        assert out.ids[prompt] == subject.oracle.results[prompt]["greedy"]
        length = len(subject.oracle.prompts[prompt])
        expected = subject.expected(prompt, "greedy_logits")[length:-1]
        torch.testing.assert_close(out.decode_logits[prompt], expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_mtp_logits(subject: Subject, prompt: int) -> None:
    next_token = subject.oracle.results[prompt]["greedy"][0]
    logits = subject.model.mtp_logits(subject.oracle.prompts[prompt], next_token)
    torch.testing.assert_close(logits, subject.expected(prompt, "mtp.logits"), atol=ATOL, rtol=0)


@pytest.mark.parametrize("share", [True, False])
def test_drafts(subject: Subject, share: bool) -> None:
    """Three drafts behind each prompt, their attention to the selection of the first (IndexShare) or to their own."""
    model, results = subject.model, subject.oracle.results
    config = replace(model.config, index_share_for_mtp_iteration=share)
    rounds = Rounds(GLM53(config, model.weights, cp=model.cp, kv=model.kv), subject.oracle.prompts, 3)
    name = "mtp_drafts_reuse" if share else "mtp_drafts_recompute"
    assert min(result["min_draft_gap"] for result in results) > ATOL
    assert [ids[0] for ids in rounds.ids] == [result["greedy"][0] for result in results]
    assert rounds.drafts == [result[name] for result in results]


def test_transformers_reads_the_checkpoint_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    """config.json and names are the released ones to a reader that is not ours."""
    from transformers import GlmMoeDsaForCausalLM

    oracle = oracle_case(tmp_path_factory, "tiny")
    model, report = GlmMoeDsaForCausalLM.from_pretrained(
        oracle.path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all(name.startswith("model.layers.7.") for name in report["unexpected_keys"])  # it has no MTP layer
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = 1e-5
        layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
    with torch.no_grad():
        logits = model(oracle.tensors["p2.input_ids"][None]).logits[0]
    torch.testing.assert_close(logits, oracle.tensors["p2.logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [2, 4])
def test_decode_over_shards_agrees_with_plain_decoding(subject: Subject, parts: int) -> None:
    """Field case B11, on prompts whose margins are wide: the shards' merge moves logits by rounding and no token."""
    model = subject.model
    split = GLM53(model.config, model.weights, cp=model.cp, kv=model.kv, decode_parts=parts)
    plain, merged = (m.generate_batch(subject.oracle.prompts, 16) for m in (model, split))
    assert merged.ids == plain.ids
    for x, y in zip(plain.decode_logits, merged.decode_logits, strict=True):
        torch.testing.assert_close(x, y, atol=ATOL, rtol=0)
