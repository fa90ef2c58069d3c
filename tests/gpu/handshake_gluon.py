"""Warpgroups that pass a buffer on by mbarriers, right by construction: controls for a tool that reports races.

What it says of these, it can say of any kernel whose warpgroups order each other by mbarriers alone. The buffer is
written and read as the attention kernels do with maxima and sums: a vector over heads, spread as a product leaves it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WIDTH = 64
HEADS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))


@gluon.jit
def give(box, full, free, turns):
    for turn in range(turns):
        mbarrier.wait(free, (turn & 1) ^ 1)
        box.store(gl.arange(0, 64, HEADS) + turn)
        mbarrier.arrive(full)


@gluon.jit
def take(out, box, full, free, turns):
    total = gl.zeros([64], gl.int32, HEADS)
    for turn in range(turns):
        mbarrier.wait(full, turn & 1)
        total += box.load(HEADS)
        mbarrier.arrive(free)
    gl.store(out + gl.arange(0, 64, HEADS), total)


@gluon.jit
def pass_on(first, second, turns):
    for turn in range(turns):
        mbarrier.wait(first, turn & 1)
        mbarrier.arrive(second)


@gluon.jit
def handshake_kernel(out, turns, RELAYED: gl.constexpr):
    """One writer, one reader. RELAYED: what is full goes from one to the other through a third warpgroup."""
    box = gl.allocate_shared_memory(gl.int32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    relayed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(relayed, count=1)
    mbarrier.init(free, count=1)
    if RELAYED:
        gl.warp_specialize(
            [
                (give, (box, full, free, turns)),
                (take, (out, box, relayed, free, turns)),
                (pass_on, (full, relayed, turns)),
            ],
            [4, 4],
            [64, 64],
        )
    else:
        gl.warp_specialize([(give, (box, full, free, turns)), (take, (out, box, full, free, turns))], [4], [64])


def handshake(turns: int, *, relayed: bool) -> Tensor:
    """int32 [WIDTH]: sum over the turns of (place + turn)."""
    out = torch.zeros(WIDTH, dtype=torch.int32, device="cuda")
    handshake_kernel[(1,)](out, turns, RELAYED=relayed, num_warps=4)
    return out
