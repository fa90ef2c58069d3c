"""Sizes of the parallel groups of an engine, and which rank is where: integers only."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cptools.integers import require_int, undivided

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankCoords:
    """Place of a global rank within its group of each kind."""

    dp_rank: int
    pcp_rank: int
    tp_rank: int
    dcp_rank: int
    ep_rank: int


@dataclass(frozen=True)
class ParallelConfig:
    """How many ways an engine is split: W = pcp, N = dcp. Local, no communication, no torch.distributed.

    The world is the mesh (dp, pcp, tp), row-major. dcp adds no ranks: it splits the KV over the `block_size` ranks of
    one dp replica. Only with pcp = tp = 1 it makes the ranks: dp * dcp of them, which compute all queries alike and
    split the KV (pure DCP). Legal dcp, and the DCP rank::

        1                            0
        a divisor of pcp, if tp = 1  pcp_rank % dcp
        pcp                          pcp_rank
        pcp * tp                     tp_rank * pcp + pcp_rank
        any, if pcp = tp = 1         rank % dcp

    Each `*_groups` returns all groups of that kind as tuples of global ranks, listed by group rank and sorted by their
    first rank; every rank of the world is in exactly one.

    Args:
        pcp: ranks that split the queries of a prompt.
        dcp: ranks that split one copy of the cached KV.
        tp: ranks that split the heads.
        ep: ranks that split the experts: 1, or the whole world, dp replicas included.
        dp: replicas of the engine.

    Raises:
        ValueError: a size < 1, or sizes that do not go together.
    """

    pcp: int = 1
    dcp: int = 1
    tp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            object.__setattr__(self, item.name, require_int(item.name, value, minimum=1))
        if not self._pure_dcp and self.dcp not in self._legal_dcp():
            raise ValueError(
                f"dcp={self.dcp} does not go with pcp={self.pcp}, tp={self.tp}: legal are {self._legal_dcp()}, "
                "so that a DCP group is a run of PCP ranks, all of them, or the whole replica"
            )
        if self.ep not in (1, self.world_size):
            raise ValueError(f"ep={self.ep} must be 1 or the whole world of {self.world_size} ranks")

    @property
    def block_size(self) -> int:
        """Ranks of one dp replica, over which the KV is split or copied."""
        return self.dcp if self._pure_dcp else self.pcp * self.tp

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.block_size

    @property
    def kv_copies_per_block(self) -> int:
        """Full copies of the KV that the ranks of one dp replica hold together."""
        return self.block_size // self.dcp

    def rank_coords(self, rank: int) -> RankCoords:
        """Place of a global rank in its groups. Raises ValueError when there is no such rank."""
        rank = require_int("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside the world of {self.world_size} ranks")
        dp_rank, in_block = divmod(rank, self.block_size)
        pcp_rank, tp_rank = (0, 0) if self._pure_dcp else divmod(in_block, self.tp)
        if self._pure_dcp:
            dcp_rank = in_block
        elif self.dcp == self.pcp * self.tp:
            dcp_rank = tp_rank * self.pcp + pcp_rank
        else:
            dcp_rank = pcp_rank % self.dcp
        return RankCoords(dp_rank, pcp_rank, tp_rank, dcp_rank, rank if self.ep > 1 else 0)

    def dp_groups(self) -> Groups:
        """Ranks of the same place in each replica."""
        return _rows(np.moveaxis(self._mesh(), 0, -1), self.dp)

    def pcp_groups(self) -> Groups:
        """Ranks that split the queries of a prompt."""
        return _rows(np.moveaxis(self._mesh(), 2, -1), self.pcp)

    def tp_groups(self) -> Groups:
        """Ranks that split the heads."""
        return _rows(self._mesh(), self.tp)

    def dcp_groups(self) -> Groups:
        """Ranks that split one copy of the KV; a replica has `kv_copies_per_block` of these groups."""
        # With tp > 1, a dcp above 1 is all of pcp or all of the replica: both are consecutive once pcp is innermost.
        return _rows(np.swapaxes(self._mesh(), 2, 3), self.dcp)

    def ep_groups(self) -> Groups:
        """Ranks that split the experts: the world, or each rank by itself."""
        return _rows(self._mesh(), self.ep)

    def validate_model(self, num_heads: int, num_experts: int) -> None:
        """Raises ValueError when tp does not divide the attention heads or ep not the routed experts of a model."""
        faults = undivided("tp", self.tp, {"num_heads": num_heads})
        faults += undivided("ep", self.ep, {"num_experts": num_experts})
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def _pure_dcp(self) -> bool:
        return self.pcp == self.tp == 1 < self.dcp

    def _legal_dcp(self) -> list[int]:
        runs = [n for n in range(1, self.pcp) if self.tp == 1 and self.pcp % n == 0]
        return sorted({1, *runs, self.pcp, self.pcp * self.tp})

    def _mesh(self) -> npt.NDArray[np.int64]:
        """Global ranks as [dp, ranks of pure DCP, pcp, tp]."""
        return np.arange(self.world_size).reshape(self.dp, -1, self.pcp, self.tp)


def _rows(mesh: npt.NDArray[np.int64], size: int) -> Groups:
    return tuple(sorted(tuple(row) for row in mesh.reshape(-1, size).tolist()))
