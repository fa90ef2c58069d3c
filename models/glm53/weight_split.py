"""Which part of every weight a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cptools.integers import require_int, undivided
from cptools.parallel_config import ParallelConfig, RankCoords

from .config import GLM53Config


@dataclass(frozen=True)
class WeightSplit:
    """Tensor parallelism splits heads and feed-forward widths, expert parallelism splits whole experts.

    TP: the rows of q_b and of gate and up, the heads of kv_b, the columns of o and down. Everything the indexer and the
    KV cache need, norms, router, embedding and lm_head are whole on every rank. With ep > 1 a rank keeps
    ``experts(n)`` at full width, whatever tp is; the shared expert is split by tp like a dense layer.

    Raises ValueError on sizes below 1 or ranks outside them.
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            require_int(item.name, getattr(self, item.name), minimum=0 if item.name.endswith("rank") else 1)
        for size, rank in ((self.tp, self.tp_rank), (self.ep, self.ep_rank)):
            if rank >= size:
                raise ValueError(f"{self} has a rank outside its size")

    @classmethod
    def of(cls, sizes: ParallelConfig, coords: RankCoords) -> WeightSplit:
        """The part of the rank at ``coords`` of an engine."""
        return cls(tp=sizes.tp, tp_rank=coords.tp_rank, ep=sizes.ep, ep_rank=coords.ep_rank)

    def shard(self, size: int, what: str = "a width") -> slice:
        """This TP rank's part of ``size`` heads, rows or columns; ValueError, naming ``what``, unless tp divides it."""
        return _part("tp", self.tp, self.tp_rank, what, size)

    def experts(self, count: int) -> slice:
        """The routed experts of this EP rank; ValueError where ep does not divide them."""
        return _part("ep", self.ep, self.ep_rank, "n_routed_experts", count)


def check_split(config: GLM53Config, split: WeightSplit) -> None:
    """ValueError, naming each, unless every size of the model that the split divides can be divided."""
    sizes = {"num_attention_heads": config.num_attention_heads}
    if "dense" in config.mlp_layer_types:
        sizes["intermediate_size"] = config.intermediate_size
    if any(config.is_sparse(layer) for layer in range(config.num_cache_layers)):
        sizes["moe_intermediate_size * n_shared_experts"] = config.moe_intermediate_size * config.n_shared_experts
        if split.ep == 1:
            sizes["moe_intermediate_size"] = config.moe_intermediate_size
    faults = undivided("tp", split.tp, sizes)
    faults += undivided("ep", split.ep, {"n_routed_experts": config.n_routed_experts})
    if faults:
        raise ValueError("; ".join(faults))


def _part(name: str, parts: int, part: int, what: str, size: int) -> slice:
    if faults := undivided(name, parts, {what: size}):
        raise ValueError(faults[0])
    each = size // parts
    return slice(part * each, (part + 1) * each)
