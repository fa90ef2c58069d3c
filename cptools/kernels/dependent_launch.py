"""Programmatic dependent launch: a kernel's programs are placed while the kernel before it still runs."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr) -> None:
    """To be called by every program before its first access to memory.

    OVERLAP says that the kernel is launched with ``launch_pdl``. Programs then start before the kernel in front of
    them has finished, and wait here until it has and its stores are visible. The kernel behind may be placed at once:
    it waits in turn, and this one ends only after its own wait, so that order holds along a whole chain. A kernel
    launched without ``launch_pdl`` behind this one starts after its end, as ever.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlapped(x: Tensor) -> dict[str, bool]:
    """Keyword arguments of a launch whose kernel has OVERLAP; off for tensors of the CPU, in Triton's interpreter."""
    return {"OVERLAP": True, "launch_pdl": True} if x.is_cuda else {"OVERLAP": False}
