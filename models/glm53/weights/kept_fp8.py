"""Which matrices can stay in FP8: a scale belongs to a whole block, in the checkpoint as in a rank's part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from cptools.kernels.block_fp8 import BLOCK

from .layout import Parameter
from .released import Shape

_NAMED = 20


def check_kept(
    needed: Sequence[Parameter], kept: Collection[str], shapes: Mapping[str, Shape], block: tuple[int, int] | None
) -> None:
    """ValueError unless the matrices among ``needed`` that are cut from ``kept`` tensors can be `BlockFP8`.

    shapes: of whole tensors. block: rows and columns to a scale in the checkpoint.
    """
    if block != (BLOCK, BLOCK):
        raise ValueError(f"keep_fp8 needs blocks of {BLOCK} x {BLOCK}, weight_block_size is {block}")
    faults = []
    for parameter in needed:
        if parameter.kind != "matrix":
            continue
        plain = [cut.name for cut in parameter.cuts if cut.name not in kept]
        if not plain:
            faults += list(_cuts_through_blocks(parameter, shapes))
        elif len(plain) < len(parameter.cuts):
            faults.append(f"{plain[0]} is not FP8, but others that belong in one tensor with it are")
    if faults:
        more = [f"and {len(faults) - _NAMED} more like these"] if len(faults) > _NAMED else []
        lines = "\n".join(f"- {fault}" for fault in faults[:_NAMED] + more)
        raise ValueError(f"these matrices can not stay in FP8, load with keep_fp8=False or split less:\n{lines}")


def _cuts_through_blocks(parameter: Parameter, shapes: Mapping[str, Shape]) -> Iterator[str]:
    for cut in parameter.cuts:
        for dim, of in enumerate(("rows", "columns")):
            start, stop, size = cut.start[dim], cut.start[dim] + cut.shape[dim], shapes[cut.name][dim]
            if start % BLOCK or (stop % BLOCK and stop != size):
                yield f"{cut.name}: {of} {start}..{stop} of {size} cut a block of {BLOCK}"
        if cut.at[-2] % BLOCK:
            yield f"{cut.name}: {cut.shape[0]} rows would begin at row {cut.at[-2]}, inside a block of {BLOCK}"
