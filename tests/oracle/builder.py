"""A second opinion on the model: a small random GLM-5.3 run by transformers, written down to compare against.

    python -m tests.oracle.builder --out DIR --preset tiny|kdim --seed 0 [--fp8]

writes into DIR

- config.json, model.safetensors: the checkpoint, released names, fp32 or with ``--fp8`` in block-FP8;
- oracle.safetensors: per prompt i what transformers computes in fp32 from the stored weights. ``p{i}.input_ids``,
  ``.logits``, ``.final_hidden`` (after model.norm); per layer ``.layer{l}.input``, ``.attn_out``, ``.topk``,
  ``.index_scores`` (layers with an indexer, the MTP layer among them), ``.experts``, ``.expert_weights`` (by ascending
  expert); ``.greedy_ids`` (prompt and continuation) and their ``.greedy_logits``; ``.mtp.logits``, ``.mtp.hidden``,
  ``.mtp.topk``. A top-k row holds ascending positions, then -1;
- oracle.json: prompts, greedy continuations, drafts, margins, versions.

transformers has no MTP layer: it is assembled here from its decoder layer. It has no block-FP8 on the CPU either: the
reference uses the dequantised weights.

**Prompts.** One flipped key or expert changes everything after it, and among hundreds of random tokens some decision
is always nearly a tie. Of several random prompts per length the one whose closest decision is widest is kept: over
every indexer, every router, the MTP layer and each greedy argmax, prompt and continuation. The choice never looks at
the code under test, and the margins are written down.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm

from models.glm53.config import GLM53Config
from models.glm53.weights import random_tensors, save_checkpoint
from tests.oracle.checkpoints import dequantised, preset_config, prompt_lengths

DRAFT_TOKENS = 3


class MTPLayer(GlmMoeDsaDecoderLayer):
    """The decoder layer of transformers with the projection in front and the norm behind that make it an MTP layer."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__(config, config.num_hidden_layers - 1)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = GlmMoeDsaRMSNorm(width, eps), GlmMoeDsaRMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": GlmMoeDsaRMSNorm(width, eps)})

    def forward(self, embeddings: Tensor, hidden: Tensor, **block: Any) -> tuple[Tensor, Tensor]:
        """Hidden states after shared_head.norm, and the top-k positions."""
        joined = torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)
        output, topk = super().forward(self.eh_proj(joined), **block)
        return self.shared_head["norm"](output), topk


@dataclass
class Trace:
    """What the layers saw and decided in one pass over S tokens, by layer index; tensors [S, ...]."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    attn_out: dict[int, Tensor] = field(default_factory=dict)
    topk: dict[int, Tensor] = field(default_factory=dict)
    index_scores: dict[int, Tensor] = field(default_factory=dict)  # -inf for later positions
    router_scores: dict[int, Tensor] = field(default_factory=dict)  # what experts are chosen by, bias included
    experts: dict[int, Tensor] = field(default_factory=dict)
    expert_weights: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Margins:
    """Distance between the last one kept and the first one dropped, where a run decides most narrowly."""

    topk: float  # inf where nothing is dropped
    router: float
    greedy: float
    topk_ties: int  # rows whose distance is exactly 0

    def closest(self) -> float:
        return min(self.topk, self.router, self.greedy)


class _RankedScores(TorchFunctionMode):
    """Sees the scores an indexer ranks, of which transformers returns only the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: int | None = None
        self.scores: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.layer is not None and func is torch.Tensor.topk:
            scores = args[0][0]
            later = torch.ones(scores.shape, dtype=torch.bool).triu(1)
            self.scores[self.layer] = scores.masked_fill(later, float("-inf"))
        return func(*args, **(kwargs or {}))


@contextmanager
def traced(layers: Sequence[GlmMoeDsaDecoderLayer]) -> Iterator[Trace]:
    """Record a pass of one sequence through ``layers`` inside the block; nothing stays hooked after it."""
    trace, ranked = Trace(), _RankedScores()
    trace.index_scores = ranked.scores
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            for handle in _watch(index, layer, trace, ranked):
                hooks.callback(handle.remove)
        hooks.enter_context(ranked)
        yield trace


def _watch(index: int, layer: GlmMoeDsaDecoderLayer, trace: Trace, ranked: _RankedScores) -> Iterator[Any]:
    def before_layer(module: nn.Module, args: Any) -> None:
        trace.inputs[index] = args[0][0]

    def after_attention(module: nn.Module, args: Any, output: Any) -> None:
        trace.attn_out[index], trace.topk[index] = output[0][0], output[2][0]

    def before_indexer(module: nn.Module, args: Any) -> None:
        ranked.layer = index

    def after_indexer(module: nn.Module, args: Any, output: Any) -> None:
        ranked.layer = None

    def after_router(module: Any, args: Any, output: Any) -> None:
        logits, weights, experts = output
        order = experts.argsort(dim=-1)
        trace.router_scores[index] = logits.sigmoid() + module.e_score_correction_bias
        trace.experts[index] = experts.gather(-1, order)
        trace.expert_weights[index] = weights.gather(-1, order)

    yield layer.register_forward_pre_hook(before_layer)
    yield layer.self_attn.register_forward_hook(after_attention)
    if layer.self_attn.indexer is not None:
        yield layer.self_attn.indexer.register_forward_pre_hook(before_indexer)
        yield layer.self_attn.indexer.register_forward_hook(after_indexer)
    if hasattr(layer.mlp, "gate"):
        yield layer.mlp.gate.register_forward_hook(after_router)


@dataclass(frozen=True)
class Run:
    """A prompt of length L and its continuation of length C >= 0, scored in one pass without a cache."""

    length: int
    tokens: Tensor  # [L + C]
    next_tokens: Tensor  # [L], what follows each token of the prompt
    logits: Tensor  # [L + C, vocab]
    hidden: Tensor  # [L + C, hidden], after model.norm
    mtp_hidden: Tensor  # [L, hidden]
    mtp_logits: Tensor  # [L, vocab]
    trace: Trace  # the MTP layer under index num_hidden_layers


class Oracle:
    """The target model of transformers and its MTP layer, filled with the same checkpoint."""

    def __init__(self, config: GLM53Config, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.target = GlmMoeDsaForCausalLM(_transformers_config(config)).eval()
        self.mtp_config = _transformers_config(_with_layer(config, "full"))
        self.mtp = MTPLayer(self.mtp_config).eval()
        # Draft steps after the first run no indexer: to transformers that is a layer which shares an earlier top-k.
        self.mtp_shared = MTPLayer(_transformers_config(_with_layer(config, "shared"))).eval()

        unused = set(weights)
        unused -= _fill(self.target, weights, "")
        for mtp in (self.mtp, self.mtp_shared):
            unused -= _fill(mtp, weights, f"model.layers.{config.num_hidden_layers}.")
        if unused:
            raise ValueError(f"transformers has no place for {sorted(unused)}")
        for layer in [*self.target.model.layers, self.mtp, self.mtp_shared]:
            layer.self_attn.q_a_layernorm.variance_epsilon = config.latent_norm_eps
            layer.self_attn.kv_a_layernorm.variance_epsilon = config.latent_norm_eps

    def run(self, prompt: Tensor, new_tokens: int) -> Run:
        """Continue a prompt greedily, with a cache, and score prompt and continuation."""
        (tokens,) = self.target.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return self.score(tokens, len(prompt))

    def score(self, tokens: Tensor, length: int) -> Run:
        """Score tokens of which the first ``length`` are the prompt."""
        with traced([*self.target.model.layers, self.mtp]) as trace:
            (hidden,) = self.target.model(tokens[None], use_cache=False).last_hidden_state
            logits = self.target.lm_head(hidden)
            next_tokens = torch.cat([tokens[1:length], logits[length - 1].argmax(dim=-1, keepdim=True)])
            mtp_hidden, _ = self._mtp_step(self.mtp, next_tokens, hidden[:length])
        return Run(length, tokens, next_tokens, logits, hidden, mtp_hidden, self.target.lm_head(mtp_hidden), trace)

    def drafts(self, run: Run, *, reuse_topk: bool) -> tuple[list[int], float]:
        """Draft tokens after the first sampled one, and their narrowest margin.

        Step 0 is the MTP layer over the prompt. Later steps feed its output back, either with its own indexer again
        or, ``index_share_for_mtp_iteration``, attending to the top-k of step 0's last row.
        """
        cache = DynamicCache(config=self.mtp_config)
        hidden, topk = self._mtp_step(self.mtp, run.next_tokens, run.hidden[: run.length], cache=cache)
        layer, kept = (self.mtp_shared, topk[-1:]) if reuse_topk else (self.mtp, None)
        drafts: list[int] = []
        margin = float("inf")
        for step in range(DRAFT_TOKENS):
            if step > 0:
                start = run.length + step - 1
                token = torch.tensor(drafts[-1:])
                hidden, _ = self._mtp_step(layer, token, hidden[-1:], start=start, cache=cache, topk=kept)
            best = self.target.lm_head(hidden[-1]).topk(2)
            drafts.append(int(best.indices[0]))
            margin = min(margin, float(best.values[0] - best.values[1]))
        return drafts, margin

    def _mtp_step(
        self,
        layer: MTPLayer,
        next_tokens: Tensor,
        hidden: Tensor,
        *,
        start: int = 0,
        cache: DynamicCache | None = None,
        topk: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The MTP layer at positions start, start + 1, ...: hidden states and top-k, [S, ...]."""
        rows = len(next_tokens)
        positions = torch.arange(start, start + rows)
        embeddings = self.target.model.embed_tokens(next_tokens).masked_fill((positions == 0)[:, None], 0.0)
        mask = torch.full((rows, start + rows), torch.finfo(hidden.dtype).min).triu(start + 1)
        output, chosen = layer(
            embeddings[None],
            hidden[None],
            attention_mask=mask[None, None],
            position_embeddings=self.target.model.rotary_emb(hidden, position_ids=positions[None]),
            position_ids=positions[None],
            cache=cache,
            prev_topk_indices=None if topk is None else topk[None],
        )
        return output[0], chosen[0]


def _with_layer(config: GLM53Config, indexer_type: str) -> GLM53Config:
    """``config`` with its MTP layer as one more decoder layer."""
    return replace(
        config,
        num_hidden_layers=config.num_hidden_layers + 1,
        indexer_types=(*config.indexer_types, indexer_type),
        mlp_layer_types=(*config.mlp_layer_types, "sparse"),
        num_nextn_predict_layers=0,
    )


def _transformers_config(config: GLM53Config) -> GlmMoeDsaConfig:
    # Without the quantisation: transformers gets the dequantised weights.
    result = GlmMoeDsaConfig.from_dict(replace(config, weight_block_size=None).to_dict())
    result._attn_implementation = "eager"
    result._experts_implementation = "eager"
    return result


def _fill(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> set[str]:
    """Load released tensors, of which transformers stacks the experts; returns the names used."""
    used: set[str] = set()

    def take(name: str) -> Tensor:
        used.add(prefix + name)
        return weights[prefix + name]

    state = {}
    for name, parameter in module.state_dict().items():
        base, _, stacked = name.partition("experts.")
        if stacked == "gate_up_proj":
            state[name] = torch.stack(
                [
                    torch.cat([take(f"{base}experts.{e}.gate_proj.weight"), take(f"{base}experts.{e}.up_proj.weight")])
                    for e in range(len(parameter))
                ]
            )
        elif stacked == "down_proj":
            state[name] = torch.stack([take(f"{base}experts.{e}.down_proj.weight") for e in range(len(parameter))])
        else:
            state[name] = take(name)
    module.load_state_dict(state)
    return used


def margins(config: GLM53Config, run: Run) -> Margins:
    topk, ties, router = float("inf"), 0, float("inf")
    for scores in run.trace.index_scores.values():
        if len(scores) > config.index_topk:
            gaps = _gap_after(scores[config.index_topk :], config.index_topk)
            topk, ties = min(topk, float(gaps.min())), ties + int((gaps == 0).sum())
    for scores in run.trace.router_scores.values():
        router = min(router, float(_gap_after(scores, config.num_experts_per_tok).min()))
    sampled = run.logits[run.length - 1 : max(run.length, len(run.tokens) - 1)]
    return Margins(topk, router, float(_gap_after(sampled, 1).min()), ties)


def _gap_after(scores: Tensor, kept: int) -> Tensor:
    best = scores.topk(kept + 1, dim=-1).values
    return best[:, kept - 1] - best[:, kept]


def widest_run(oracle: Oracle, prompts: Tensor, new_tokens: int) -> Run:
    """The run of the prompt whose closest decision, continuation included, is widest."""
    bounds = [margins(oracle.config, oracle.score(prompt, len(prompt))).closest() for prompt in prompts]
    best: Run | None = None
    margin = -1.0
    # A continuation only adds decisions: a prompt whose own margin is narrower than a whole run's cannot win.
    for bound, prompt in sorted(zip(bounds, prompts, strict=True), key=lambda pair: pair[0], reverse=True):
        if best is not None and bound <= margin:
            break
        run = oracle.run(prompt, new_tokens)
        found = margins(oracle.config, run).closest()
        if found > margin:
            best, margin = run, found
    if best is None:
        raise ValueError("there is no prompt to choose")
    return best


def _ascending_topk(topk: Tensor, width: int) -> Tensor:
    """[S, k] -> [S, width]: positions up to the row's own, ascending, then -1.

    With fewer earlier positions than k transformers fills up with later ones, which its mask then hides.
    """
    beyond = torch.iinfo(torch.int64).max
    rows, k = topk.shape
    result = torch.full((rows, width), beyond, dtype=torch.int64)
    result[:, :k] = topk
    result[result > torch.arange(rows)[:, None]] = beyond
    result = result.sort(dim=-1).values
    return result.masked_fill(result == beyond, -1)


def _reference_tensors(config: GLM53Config, run: Run) -> dict[str, Tensor]:
    """What is written of a run: rows of the prompt, but for the continuation's tokens and logits."""
    length, trace, mtp_layer = run.length, run.trace, config.num_hidden_layers
    tensors = {
        "input_ids": run.tokens[:length],
        "logits": run.logits[:length],
        "final_hidden": run.hidden[:length],
        "greedy_ids": run.tokens,
        "greedy_logits": run.logits,
        "mtp.logits": run.mtp_logits,
        "mtp.hidden": run.mtp_hidden,
        "mtp.topk": _ascending_topk(trace.topk[mtp_layer], config.index_topk),
    }
    for layer in range(config.num_hidden_layers):
        tensors[f"layer{layer}.input"] = trace.inputs[layer][:length]
        tensors[f"layer{layer}.attn_out"] = trace.attn_out[layer][:length]
        tensors[f"layer{layer}.topk"] = _ascending_topk(trace.topk[layer][:length], config.index_topk)
        if config.is_sparse(layer):
            tensors[f"layer{layer}.experts"] = trace.experts[layer][:length]
            tensors[f"layer{layer}.expert_weights"] = trace.expert_weights[layer][:length]
    for layer in config.index_layers:
        tensors[f"layer{layer}.index_scores"] = trace.index_scores[layer][:length, :length]
    return tensors


def _summary(oracle: Oracle, run: Run) -> dict[str, object]:
    found = margins(oracle.config, run)
    recomputed, recomputed_gap = oracle.drafts(run, reuse_topk=False)
    reused, reused_gap = oracle.drafts(run, reuse_topk=True)
    greedy = run.tokens[run.length :]
    return {
        "length": run.length,
        "greedy": greedy.tolist(),
        "cache_equals_no_cache": bool((run.logits[run.length - 1 : -1].argmax(dim=-1) == greedy).all()),
        "min_topk_gap": found.topk if found.topk < float("inf") else None,
        "min_router_gap": found.router,
        "min_greedy_gap": found.greedy,
        "topk_exact_ties": found.topk_ties,
        "logits_std": float(run.logits[: run.length].std()),
        "mtp_drafts_recompute": recomputed,
        "mtp_drafts_reuse": reused,
        "min_draft_gap": min(recomputed_gap, reused_gap),
    }


@torch.no_grad()
def build_oracle(
    out_dir: str | Path,
    preset: str = "tiny",
    seed: int = 0,
    fp8: bool = False,
    *,
    candidates: int = 12,
    new_tokens: int = 16,
) -> None:
    """Write checkpoint and reference of one random model into ``out_dir``, which is created."""
    out = Path(out_dir)
    config = preset_config(preset, fp8=fp8)
    stored = random_tensors(config, seed=seed, fp8=fp8)
    save_checkpoint(out, config, stored)
    oracle = Oracle(config, dequantised(stored, config.weight_block_size))

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    prompts: list[list[int]] = []
    results: list[dict[str, object]] = []
    for index, length in enumerate(prompt_lengths(config.index_topk)):
        drawn = torch.randint(config.vocab_size, (candidates, length), generator=generator)
        run = widest_run(oracle, drawn, new_tokens)
        tensors |= {f"p{index}.{name}": value.clone() for name, value in _reference_tensors(config, run).items()}
        prompts.append(run.tokens[:length].tolist())
        results.append(_summary(oracle, run))
    save_file(tensors, out / "oracle.safetensors")

    description = {
        "preset": preset,
        "seed": seed,
        "fp8": fp8,
        "candidates": candidates,
        "config": asdict(config),
        "prompts": prompts,
        "results": results,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (out / "oracle.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random checkpoint and what transformers makes of it.")
    parser.add_argument("--out", required=True)
    parser.add_argument("--preset", choices=["tiny", "kdim"], default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fp8", action="store_true", help="store the weights as the released block-FP8 build does")
    parser.add_argument("--candidates", type=int, default=12, help="prompts drawn per length, of which one is kept")
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    build_oracle(args.out, args.preset, args.seed, args.fp8, candidates=args.candidates, new_tokens=args.new_tokens)


if __name__ == "__main__":
    main()
