"""The parallel modules through which a model on one rank knows of the others, and its part of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from cptools import LoadBalancedCPShard, LSEMerge, ParallelGroups, RoundRobinKVShard

from .config import GLM53Config
from .layer_split import LayerSplit
from .weight_split import WeightSplit, check_split


@dataclass(frozen=True, eq=False)
class RankModules:
    cp: LoadBalancedCPShard
    kv: RoundRobinKVShard
    merge: LSEMerge | None
    split: LayerSplit
    part: WeightSplit

    @classmethod
    def over(
        cls, parallel: ParallelGroups | None, config: GLM53Config, *, interleave: int, page_size: int
    ) -> RankModules:
        """Of a rank of an engine, whose groups stay the caller's; without groups, of a model alone. Local.

        Raises ValueError, on all ranks alike, where sizes of the engine do not divide those of the model.
        """
        if parallel is None:
            return cls(
                cp=LoadBalancedCPShard(world_size=1, rank=0),
                kv=RoundRobinKVShard(world_size=1, rank=0, interleave=interleave, page_size=page_size),
                merge=None,
                split=LayerSplit.alone(config.n_routed_experts),
                part=WeightSplit(),
            )
        sizes = parallel.config
        part = WeightSplit.of(sizes, parallel.coords)
        check_split(config, part)
        # A rank needs its own heads of decode rows; where every rank has others, the merge gives it just these.
        own_heads = sizes.pcp == 1 < sizes.tp == sizes.dcp
        return cls(
            cp=LoadBalancedCPShard(group=parallel.pcp),
            kv=RoundRobinKVShard(group=parallel.dcp, interleave=interleave, page_size=page_size),
            merge=LSEMerge(group=parallel.dcp, scatter="heads" if own_heads else "none"),
            split=LayerSplit.over(parallel, config.n_routed_experts),
            part=part,
        )
