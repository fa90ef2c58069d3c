"""What ops ask of their arguments before a kernel gets their addresses: dtypes, shapes, devices, strides, alignment.

Where torch broadcasts, casts or raises an error of its own, a kernel would read beyond the end; so both refuse the same
with a ValueError that has the numbers. Nothing here looks at values, so nothing waits for a device; all of it can be
traced by torch.compile, and decode pays less than a microsecond for a few tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..integers import require_int

INTEGERS = (torch.int64, torch.int32)
"""Dtypes of indices. Narrower ones are left out: torch takes uint8 and bool for masks."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOATS_AND_DOUBLE = (*FLOATS, torch.float64)

ANY = -1
"""A size of a shape that may be anything."""


def check_tensor(op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """ValueError unless x has one of the dtypes and the shape, in which `ANY` stands for any size."""
    got = x.shape
    if x.dtype in dtypes:
        if got == shape:
            return
        if len(got) == len(shape):
            # By statements: `in` and `all` do not compare sizes that are symbols in a trace.
            for size, want in zip(got, shape, strict=True):
                if want != ANY and size != want:
                    break
            else:
                return
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    sizes = ", ".join("any" if size == ANY else f"{size}" for size in shape)
    raise ValueError(
        f"{op}: {name} must be {kinds} [{sizes}], got {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    )


def check_integers(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless x holds indices (int64 or int32) in this shape, in which `ANY` stands for any size."""
    check_tensor(op, name, x, INTEGERS, shape)


def check_one_device(op: str, **tensors: Tensor | None) -> None:
    """ValueError unless all tensors that are not None are on one device."""
    first = None
    for x in tensors.values():
        if x is None:
            continue
        if first is None:
            first = x.device
        elif x.device != first:
            where = ", ".join(f"{name} on {x.device}" for name, x in tensors.items() if x is not None)
            raise ValueError(f"{op}: tensors must be on one device, got {where}")


def check_count(op: str, name: str, value: int, *, minimum: int = 0) -> None:
    """ValueError unless value is an integer, and at least the minimum."""
    if type(value) is not int or value < minimum:
        require_int(f"{op}: {name}", value, minimum=minimum)


def dense(x: Tensor) -> Tensor:
    """x itself where it is contiguous, else a copy that is: for kernels that take an index tensor by its address."""
    return x if x.is_contiguous() else x.contiguous()


def dense_rows(x: Tensor) -> Tensor:
    """x itself where its last dim is contiguous, else a copy: for kernels that take the other strides."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def is_aligned(x: Tensor, multiple: int) -> bool:
    """Whether the memory of x starts at a multiple of so many bytes, for the choice of an implementation.

    True in a trace of torch.compile, where there are no addresses yet: so the custom op that is chosen by this passes
    its tensors through `aligned`.
    """
    return torch.compiler.is_compiling() or x.data_ptr() % multiple == 0


def aligned(x: Tensor, multiple: int) -> Tensor:
    """x itself where its memory starts at a multiple of so many bytes, else a copy, which does."""
    return x if x.data_ptr() % multiple == 0 else x.clone()


def holds_words(rows: Tensor, size: int, first: int = 0) -> bool:
    """Whether bytes [S, row] can be viewed as words of so many bytes, from byte ``first`` of each row on.

    Addresses count as multiples in a trace of torch.compile, as in `is_aligned`; there such a view is an error.
    """
    if rows.stride(1) != 1 or rows.stride(0) % size:
        return False
    if torch.compiler.is_compiling():
        return True
    return (rows.storage_offset() + first) % size == 0 and (rows.data_ptr() + first) % size == 0
