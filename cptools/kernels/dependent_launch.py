"""Programmatic dependent launch: a kernel's programs are placed while the kernel before it still runs."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr, EARLY: tl.constexpr) -> None:
    """To be called by every program before its first access to memory.

    OVERLAP says that the kernel is launched with ``launch_pdl``. Programs then start before the kernel in front of
    them has finished, and wait here until it has and its stores are visible. With EARLY the kernel behind may be
    placed at once: it waits in turn, and this one ends only after its own wait, so that order holds along a whole
    chain. A kernel launched without ``launch_pdl`` behind this one starts after its end, as ever.
    """
    if OVERLAP:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr, EARLY: tl.constexpr) -> None:
    """To be called before the last stores of a kernel whose programs do not all fit on the chip at once.

    Early, the kernel behind would take the places of programs of this one that are still to come.
    """
    if OVERLAP:
        if not EARLY:
            gdc_launch_dependents()


def overlapped(x: Tensor, *, early: bool) -> dict[str, bool]:
    """Keyword arguments of a launch with OVERLAP and EARLY; off for tensors of the CPU, in Triton's interpreter."""
    return {"EARLY": early, "OVERLAP": x.is_cuda} | ({"launch_pdl": True} if x.is_cuda else {})
