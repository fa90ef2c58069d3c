"""Which part of every weight a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cptools.integers import require_int


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

    def shard(self, size: int) -> slice:
        """This TP rank's part of ``size`` heads, rows or columns; ValueError where tp does not divide it."""
        return _part(size, self.tp, self.tp_rank)

    def experts(self, count: int) -> slice:
        """The routed experts of this EP rank; ValueError where ep does not divide them."""
        return _part(count, self.ep, self.ep_rank)


def _part(size: int, parts: int, part: int) -> slice:
    if size % parts:
        raise ValueError(f"{size} can not be split evenly over {parts} ranks")
    each = size // parts
    return slice(part * each, (part + 1) * each)
