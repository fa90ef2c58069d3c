"""The plainest handshake of two warpgroups through one buffer, right by construction.

What a tool says of it, it can say of any kernel whose warpgroups order each other by mbarriers alone.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WIDTH = 128
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def give(box, full, free, turns):
    for turn in range(turns):
        mbarrier.wait(free, (turn & 1) ^ 1)
        box.store(gl.arange(0, 128, LINE) + turn)
        mbarrier.arrive(full)


@gluon.jit
def take(out, box, full, free, turns):
    total = gl.zeros([128], gl.int32, LINE)
    for turn in range(turns):
        mbarrier.wait(full, turn & 1)
        total += box.load(LINE)
        mbarrier.arrive(free)
    gl.store(out + gl.arange(0, 128, LINE), total)


@gluon.jit
def handshake_kernel(out, turns):
    box = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize([(give, (box, full, free, turns)), (take, (out, box, full, free, turns))], [4], [64])


def handshake(turns: int) -> Tensor:
    """int32 [WIDTH]: sum over the turns of (place + turn)."""
    out = torch.zeros(WIDTH, dtype=torch.int32, device="cuda")
    handshake_kernel[(1,)](out, turns, num_warps=4)
    return out
