"""Which matrices can stay in FP8: a scale belongs to a whole block, in the checkpoint as in a rank's part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from cptools.kernels.block_fp8 import BLOCK

from ..config import GLM53Config
from ..weight_split import WeightSplit
from .faults import fault_lines
from .layout import Parameter, parameters
from .released import Shape


def check_kept(config: GLM53Config, split: WeightSplit, kept: Collection[str], shapes: Mapping[str, Shape]) -> None:
    """ValueError, on all ranks of the split alike, unless the matrices cut from ``kept`` tensors can be `BlockFP8`.

    shapes: of whole tensors.
    """
    if config.weight_block_size != (BLOCK, BLOCK):
        raise ValueError(f"keep_fp8 needs blocks of {BLOCK} x {BLOCK}, weight_block_size is {config.weight_block_size}")
    faults = []
    for parameter in parameters(config, WeightSplit()):
        plain = [cut.name for cut in parameter.cuts if cut.name not in kept]
        if parameter.kind == "matrix" and 0 < len(plain) < len(parameter.cuts):
            faults.append(f"{plain[0]} is not FP8, but others that belong in one tensor with it are")
    # Parts are of equal size, so if any of them cuts a block, the first one ends inside a block.
    for parameter in parameters(config, replace(split, tp_rank=0, ep_rank=0)):
        if parameter.kind == "matrix" and parameter.cuts[0].name in kept:
            faults += list(_cuts_through_blocks(parameter, shapes))
    if faults:
        how = "load with keep_fp8=False or split less"
        raise ValueError(f"these matrices can not stay in FP8, {how}:\n{fault_lines(faults)}")


def _cuts_through_blocks(parameter: Parameter, shapes: Mapping[str, Shape]) -> Iterator[str]:
    for cut in parameter.cuts:
        for dim, of in enumerate(("rows", "columns")):
            start, stop, size = cut.start[dim], cut.start[dim] + cut.shape[dim], shapes[cut.name][dim]
            if start % BLOCK or (stop % BLOCK and stop != size):
                yield f"{cut.name}: {of} {start}..{stop} of {size} cut a block of {BLOCK}"
        if cut.at[-2] % BLOCK:
            yield f"{cut.name}: {cut.shape[0]} rows would begin at row {cut.at[-2]}, inside a block of {BLOCK}"
