"""What the parts of GLM-5.3's layers must move and compute at least: the floors of `benchmarks.layers`.

Parts carry the names of the spans of `models.glm53.block`. A floor is the larger of bytes at the measured copy rate and
operations at the measured matrix rates (`benchmarks.gpu_timing`); weights are block-FP8, so are cached rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu_timing import floor_us
from models.glm53 import GLM53Config

PARTS = ("new rows", "context", "queries", "select", "attend", "output", "feed forward")


@dataclass(frozen=True)
class Work:
    """Rows of one rank in one step: ``rows`` queries of which each sees ``context`` cached tokens, and prompt rows also
    those of the step before them. ``keys`` is what the rank gathers for prompts; 0 for decode, which reads pages."""

    rows: int
    context: int
    requests: int = 1
    prompt: bool = True

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the indexer scores."""
        return self.rows * self.context + (self.rows * (self.rows + 1) // 2 if self.prompt else self.rows)

    def attended(self, k: int) -> int:
        """(query, key) pairs of attention over at most ``k`` selected keys a query."""
        if not self.prompt:
            return self.rows * min(k, self.context + 1)
        short = min(max(k - self.context - 1, 0), self.rows)
        return short * self.context + short * (short + 1) // 2 + (self.rows - short) * k

    @property
    def keys(self) -> int:
        """Tokens whose rows the queries may see, over all requests."""
        return self.context + self.rows if self.prompt else self.requests * (self.context + 1)


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """Expected number of experts that ``rows`` tokens touch, each choosing ``chosen`` of them uniformly."""
    return experts * (1.0 - (1.0 - chosen / experts) ** rows)


def part_floors(config: GLM53Config, work: Work, *, full: bool) -> Mapping[str, float]:
    """Microseconds of each part of one sparse layer; ``full``: it runs its own indexer."""
    t, h, heads = work.rows, config.hidden_size, config.num_attention_heads
    latent, row = config.kv_lora_rank, config.mla_row_dim
    mla_bytes, index_bytes = 656, 132
    index_heads, index_dim = config.index_n_heads, config.index_head_dim
    attended = work.attended(config.index_topk)

    def product(outputs: int, inputs: int, weight_bytes: float = 1.0, flop_per_fp8: float = 1.0) -> tuple[float, float]:
        """(bytes, operations at the FP8 rate) of [t, inputs] by [inputs, outputs]; activations in BF16."""
        moved = outputs * inputs * weight_bytes + 2 * t * (outputs + inputs)
        return moved, 2 * t * outputs * inputs * flop_per_fp8

    def floor(*products: tuple[float, float], moved: float = 0.0, bf16_flop: float = 0.0) -> float:
        return floor_us(
            moved_bytes=moved + sum(p[0] for p in products),
            fp8_flop=sum(p[1] for p in products),
            bf16_flop=bf16_flop,
        )

    key = (product(index_dim, h, 2.0, 2.0),) if full else ()
    scoring = 2 * index_heads * index_dim * work.pairs
    selection = (
        (product(index_heads * index_dim, config.q_lora_rank), product(index_heads, h, 4.0, 2.0), (0.0, scoring))
        if full
        else ()
    )
    read_keys = work.keys * index_bytes if full else 0
    width, touched = (
        config.moe_intermediate_size,
        distinct_experts(config.n_routed_experts, config.num_experts_per_tok, t),
    )
    experts = 3 * width * h * (touched + config.n_shared_experts)
    mixture = 2 * 3 * t * width * h * (config.num_experts_per_tok + config.n_shared_experts)
    values = config.v_head_dim
    return {
        "new rows": floor(product(row, h), *key, moved=t * (mla_bytes + (index_bytes if full else 0))),
        # Gathered and up-converted to BF16 once a layer; decode reads pages.
        "context": floor_us(moved_bytes=work.keys * (mla_bytes + 2 * row) if work.prompt else 0.0),
        "queries": floor(product(config.q_lora_rank, h), product(heads * config.qk_head_dim, config.q_lora_rank)),
        "select": floor(*selection, moved=read_keys),
        "attend": floor_us(
            moved_bytes=2 * heads * config.qk_nope_head_dim * latent
            + min(attended, work.keys) * (2 * row if work.prompt else mla_bytes)
            + 2 * t * heads * (row + latent),
            bf16_flop=2 * heads * (t * config.qk_nope_head_dim * latent + attended * (row + latent)),
        ),
        "output": floor(
            product(h, heads * values), moved=2 * heads * values * latent, bf16_flop=2 * t * heads * latent * values
        ),
        "feed forward": floor_us(moved_bytes=experts + 6 * t * h, fp8_flop=mixture),
    }
