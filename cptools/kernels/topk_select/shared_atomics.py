"""Histograms and slots for appending, by atomics on shared memory, which Triton itself does not offer.

Functions with a side effect are inline PTX over elements, so they must be given tensors of at least one element a
thread: where a layout repeats elements, their effect would be repeated too.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


def _claim_asm(pack: int) -> tuple[str, str]:
    """Slots for flagged elements from a counter in shared memory: one atomic a thread for ``pack`` elements."""
    flags = [f"${pack + i}" for i in range(pack)]
    lines = ["{", ".reg .pred some;", ".reg .b32 total, base;", "mov.b32 total, 0;"]
    for i, flag in enumerate(flags):  # exclusive prefix in the outputs
        lines += [f"mov.b32 ${i}, total;", f"add.u32 total, total, {flag};"]
    lines += ["setp.ne.u32 some, total, 0;", "mov.b32 base, 0;"]
    lines += [f"@some atom.shared.add.u32 base, [${2 * pack}], total;"]
    lines += [f"add.u32 ${i}, ${i}, base;" for i in range(pack)]
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * pack + ["r"] * (2 * pack))


_CLAIM_PACK = tl.constexpr(8)
_CLAIM, _CLAIM_CONSTRAINTS = (tl.constexpr(text) for text in _claim_asm(8))
# Triton has no shared memory that atomics reach: a static array, whose address is a plain number.
_SHARED = tl.constexpr("{ .shared .align 16 .b8 topk_select_shared[8208]; mov.u32 $0, topk_select_shared; }")
_COUNTER = tl.constexpr(8192)


@triton.jit
def shared_base():
    return tl.inline_asm_elementwise(_SHARED, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def shared_store(address, value):
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def shared_load(address):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def count_where(address, flag):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,r,r",
        [address, flag.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def claim(shared, flag):
    """A slot of its own for every flagged element, from the counter on."""
    return tl.inline_asm_elementwise(
        _CLAIM,
        _CLAIM_CONSTRAINTS,
        [flag.to(tl.int32), shared + _COUNTER],
        dtype=tl.int32,
        is_pure=False,
        pack=_CLAIM_PACK,
    )


@triton.jit
def read_counter(shared):
    tl.debug_barrier()
    count = shared_load(shared + _COUNTER)
    tl.debug_barrier()
    return count


@triton.jit
def set_counter(shared, value):
    tl.debug_barrier()
    shared_store(shared + _COUNTER, value)
    tl.debug_barrier()


@triton.jit
def store_where(pointers, values, flag):
    """tl.store of int64 in the layout that the values have; tl.store may exchange them first."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,l,r",
        [pointers.to(tl.int64), values, flag.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
