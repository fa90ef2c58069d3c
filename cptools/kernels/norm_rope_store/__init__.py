"""From the raw projections of a token to its rows in the cache, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import FP8, SCALE_BLOCK
from ..arguments import FLOATS, is_aligned
from ..impl import Choice, choose, triton_obstacle
from ..rowwise import RopeAngles
from . import reference
from .reference import IndexInput, MlaInput

__all__ = ["IndexInput", "MlaInput", "choose_norm_rope_store", "norm_rope_store"]


def norm_rope_store(
    slots: Tensor,
    angles: RopeAngles | None,
    *,
    mla: MlaInput | None = None,
    index: IndexInput | None = None,
    page_size: int,
    impl: str = "auto",
) -> None:
    """Store the MLA rows and the index rows of T tokens at slots [T] int64 of their pages, in place; -1 is skipped.

    MLA row: RMS norm of c_kv, k_pe rotated, packed. Index row: layer norm of the key, its first pairs rotated, packed.
    Either part may be missing, its norm too, and without angles nothing is rotated: then this is quantise and store.
    Every step rounds to the dtype of the inputs, so that where the norm's sums agree, the bytes do: those of
    ``row_format.pack``. Slots must be unique.

    Local, on the current stream. The reference raises ValueError on a slot below -1 or beyond the pages; the kernel
    skips it, and may be captured in a CUDA graph. Raises ValueError where shapes, dtypes or devices do not fit; then,
    and on such a slot, nothing was written.
    """
    reference.check_inputs(slots, angles, mla=mla, index=index, page_size=page_size)
    if choose_norm_rope_store(slots, angles, mla=mla, index=index, page_size=page_size, impl=impl).impl != "triton":
        reference.norm_rope_store(slots, angles, mla=mla, index=index, page_size=page_size)
        return
    from . import triton

    triton.norm_rope_store(
        slots,
        None if angles is None else angles.cos,
        None if angles is None else angles.sin,
        *((None,) * 4 if mla is None else (mla.c_kv, mla.k_pe, mla.norm_weight, mla.pages)),
        *((None,) * 4 if index is None else (index.key, index.norm_weight, index.norm_bias, index.pages)),
        mla_dtype=FP8 if mla is None else mla.row_format.dtype,
        index_dtype=FP8 if index is None else index.row_format.dtype,
        mla_eps=0.0 if mla is None else mla.eps,
        key_eps=0.0 if index is None else index.eps,
        mla_power_of_two=mla is None or mla.row_format.power_of_two_scales,
        index_power_of_two=index is None or index.row_format.power_of_two_scales,
        page_size=page_size,
    )


def choose_norm_rope_store(
    slots: Tensor,
    angles: RopeAngles | None,
    *,
    mla: MlaInput | None = None,
    index: IndexInput | None = None,
    page_size: int,
    impl: str = "auto",
) -> Choice:
    """What `norm_rope_store` would run for these inputs, and why nothing faster."""
    return choose("norm_rope_store", impl, {"triton": _obstacle(slots, angles, mla, index, page_size)})


def _obstacle(
    slots: Tensor, angles: RopeAngles | None, mla: MlaInput | None, index: IndexInput | None, page_size: int
) -> str | None:
    inputs: list[Tensor] = []
    pages: list[Tensor] = []
    if mla is not None:
        latent, rope = mla.row_format.latent, mla.row_format.rope
        if latent % SCALE_BLOCK or not _power_of_two(latent // SCALE_BLOCK):
            return f"latent={latent} is not 128 * 2^i"
        if rope < 2 or not _power_of_two(rope):
            return f"rope={rope} is not a power of two >= 2"
        inputs += [mla.c_kv, mla.k_pe, *([] if mla.norm_weight is None else [mla.norm_weight])]
        pages.append(mla.pages)
    if index is not None:
        dim = index.row_format.dim
        if dim % SCALE_BLOCK or not _power_of_two(dim // SCALE_BLOCK):
            return f"dim={dim} of the index key is not 128 * 2^i"
        inputs += [index.key, *(x for x in (index.norm_weight, index.norm_bias) if x is not None)]
        pages.append(index.pages)
    if len(pages) == 2 and pages[0].shape[0] != pages[1].shape[0]:
        return f"MLA rows have {pages[0].shape[0]} pages, index rows {pages[1].shape[0]}"
    for x in inputs:
        if x.dtype not in FLOATS:
            return f"inputs are {', '.join(str(x.dtype) for x in inputs)}"
    if angles is not None:
        if angles.cos.dtype != torch.float32 or angles.cos.stride() != angles.sin.stride():
            return "cos and sin are not alike in float32"
        inputs += [angles.cos, angles.sin]
    for x in (*inputs, *pages):
        if x.stride(-1) != 1:
            return "a tensor is not dense in its last dim"
    if any(not is_aligned(p, 4) or (p.shape[0] > 1 and p.stride(0) % 4) for p in pages):
        return "pages are not aligned to 4 bytes"
    return triton_obstacle(slots.device)


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
