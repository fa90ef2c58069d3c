"""Tiles, barriers and register layouts of the relay kernel: what its three warpgroups must agree on."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
BLOCK = gl.constexpr(64)
HEADS = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.0e38)  # finite, so that a difference of two maxima of nothing is 0 and not NaN

# Eight lanes a row, 128 bytes: few row indices in registers, whole sectors.
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
PER_HEAD = gl.constexpr(gl.SliceLayout(1, SCORES.value))
PER_ROW = gl.constexpr(gl.SliceLayout(1, GATHER.value))
# What a quad of threads holds in OUTPUT, dealt so that a thread has 8 neighbouring columns of a head.
WRITTEN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# Tiles: the quarters in the order in which they are filled, the rotary parts, the query.
EVEN_LEFT = gl.constexpr(0)
EVEN_RIGHT = gl.constexpr(1)
ODD_RIGHT = gl.constexpr(2)
ODD_LEFT = gl.constexpr(3)
EVEN_ROPE = gl.constexpr(4)
ODD_ROPE = gl.constexpr(5)
Q_LEFT = gl.constexpr(6)
Q_RIGHT = gl.constexpr(7)
Q_ROPE = gl.constexpr(8)

# Barriers: a quarter is full (numbered as the tile), a quarter is free again (+ FREE), what the consumers exchange.
FREE = gl.constexpr(4)
QUERY_FULL = gl.constexpr(8)
QUERY_FREE = gl.constexpr(9)
EVEN_WEIGHTS = gl.constexpr(10)
ODD_WEIGHTS = gl.constexpr(11)
EVEN_TOTAL = gl.constexpr(12)
ODD_TOTAL = gl.constexpr(13)


@gluon.jit
def shared(dtype: gl.constexpr, size: gl.constexpr):
    return gl.allocate_shared_memory(dtype, [size], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def tile(lines: gl.constexpr, width: gl.constexpr):
    """The leading 1 lets a tile be indexed with a run-time 0."""
    return gl.allocate_shared_memory(gl.bfloat16, [1, lines, width], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def barrier(count: gl.constexpr):
    """One allocation each: barriers in one allocation would be taken for aliases and fenced from each other."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar
