"""What is stored of a token in one layer, from the raw projections on: the composition of the row-wise ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import IndexRows, MlaRows
from ..kv_store.reference import store_rows
from ..rowwise.reference import RopeAngles, layer_norm, rms_norm, rope_interleaved


@dataclass(frozen=True, eq=False)
class MlaInput:
    """Raw MLA projections of T tokens and where their rows go.

    c_kv [T, latent] and k_pe [T, rope], any row stride; norm_weight [latent] of the RMS norm, None where c_kv is normed
    already; pages uint8 [P, page_size * row_format.row_bytes], written in place.
    """

    c_kv: Tensor
    k_pe: Tensor
    norm_weight: Tensor | None
    eps: float
    pages: Tensor
    row_format: MlaRows


@dataclass(frozen=True, eq=False)
class IndexInput:
    """Raw indexer keys of T tokens and where their rows go.

    key [T, dim], any row stride; norm_weight and norm_bias [dim] of the layer norm, None where the key is normed
    already; pages uint8 [P, page_size * row_format.row_bytes], written in place.
    """

    key: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    pages: Tensor
    row_format: IndexRows


def norm_rope_store(
    slots: Tensor, angles: RopeAngles | None, *, mla: MlaInput | None, index: IndexInput | None, page_size: int
) -> None:
    """Norm, rotate, pack and store; every step rounds to the dtype of its input, as in the ops it is made of."""
    if mla is not None:
        latent = mla.c_kv if mla.norm_weight is None else rms_norm(mla.c_kv, mla.norm_weight, mla.eps)
        rope = mla.k_pe if angles is None else rope_interleaved(mla.k_pe, angles)
        rows = mla.row_format.pack(latent, rope)
        store_rows(mla.pages, slots, rows, planes=mla.row_format.planes, page_size=page_size)
    if index is not None:
        key = index.key
        if index.norm_weight is not None and index.norm_bias is not None:
            key = layer_norm(key, index.norm_weight, index.norm_bias, index.eps)
        if angles is not None:
            width = 2 * angles.cos.shape[1]
            key = torch.cat([rope_interleaved(key[:, :width], angles), key[:, width:]], dim=1)
        rows = index.row_format.pack(key)
        store_rows(index.pages, slots, rows, planes=index.row_format.planes, page_size=page_size)


def check_inputs(
    slots: Tensor, angles: RopeAngles | None, *, mla: MlaInput | None, index: IndexInput | None, page_size: int
) -> None:
    """ValueError where shapes do not fit."""
    tokens = slots.shape[0]
    want: list[tuple[str, Tensor | None, tuple[int, ...]]] = []
    pages = []
    if mla is not None:
        latent, rope = mla.row_format.latent, mla.row_format.rope
        want += [("c_kv", mla.c_kv, (tokens, latent)), ("k_pe", mla.k_pe, (tokens, rope))]
        want += [("norm_weight", mla.norm_weight, (latent,))]
        if angles is not None:
            want += [("cos", angles.cos, (tokens, rope // 2)), ("sin", angles.sin, (tokens, rope // 2))]
        pages.append((mla.pages, mla.row_format.row_bytes))
    if index is not None:
        dim = index.row_format.dim
        want += [("key", index.key, (tokens, dim))]
        want += [("key norm_weight", index.norm_weight, (dim,)), ("key norm_bias", index.norm_bias, (dim,))]
        if (index.norm_weight is None) != (index.norm_bias is None):
            raise ValueError("norm_rope_store: the layer norm needs both norm_weight and norm_bias, or neither")
        if angles is not None and 2 * angles.cos.shape[1] > dim:
            raise ValueError(f"norm_rope_store: {angles.cos.shape[1]} pairs to rotate in a key of dim={dim}")
        pages.append((index.pages, index.row_format.row_bytes))
    for name, tensor, shape in want:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"norm_rope_store: {name} must be {list(shape)}, got {list(tensor.shape)}")
    for tensor, row_bytes in pages:
        if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] != page_size * row_bytes:
            raise ValueError(
                f"norm_rope_store: pages must be uint8 [P, {page_size * row_bytes}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
