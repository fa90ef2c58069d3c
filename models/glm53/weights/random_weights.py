"""Random weights of any size, made where they are used."""

from __future__ import annotations

import torch

from ..config import GLM53Config
from ..weight_split import WeightSplit
from .fill import Filling, fill
from .kept_fp8 import check_kept
from .layout import assemble, check_weight_types
from .model_weights import ModelWeights
from .random_source import RandomSource
from .released import scale_name


def random_weights(
    config: GLM53Config,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    keep_fp8: bool = False,
    split: WeightSplit | None = None,
    seed: int = 0,
    router_skew: float = 0.0,
) -> ModelWeights:
    """What `load_weights` of the same arguments gives for a saved `RandomSource` of this seed, without the checkpoint.

    Made on ``device`` piece by piece, beyond the weights themselves in less than 1 GiB. One seed is one model on every
    device, at every split and with or without ``keep_fp8``. router_skew: see `RandomSource`; random weights route and
    select keys close to uniformly, which real text does not. Local, no sync.

    Raises ValueError as `load_weights` does.
    """
    check_weight_types(dtype, keep_fp8)
    split = split or WeightSplit()
    source = RandomSource(config, seed=seed, device=device, router_skew=router_skew)
    kept = {name for name in source.shapes if keep_fp8 and scale_name(name) in source.shapes}
    if kept:
        check_kept(config, split, kept, source.shapes)
    filling = Filling(torch.device(device), dtype, kept)
    weights = assemble(config, split, filling)
    for cut, into in filling.places:
        fill(cut, into, source.read, config.weight_block_size)
    return weights
