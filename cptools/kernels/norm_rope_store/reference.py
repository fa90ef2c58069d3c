"""What is stored of a token in one layer, from the raw projections on: the composition of the row-wise ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import IndexRows, MlaRows
from ..arguments import ANY, FLOATS_AND_DOUBLE, check_integers, check_one_device, check_tensor
from ..kv_store.reference import check_pages, check_slots, store_rows
from ..rowwise.reference import RopeAngles, check_angles, layer_norm, rms_norm, rope_interleaved


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
    # Both before the first is stored: a slot that one of them does not have must leave the other as it was.
    for part in (mla, index):
        if part is not None:
            check_slots("norm_rope_store", slots, part.pages.shape[0] * page_size)
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
    """ValueError where shapes, dtypes or devices do not fit."""
    op = "norm_rope_store"
    check_integers(op, "slots", slots, (ANY,))
    tokens = slots.shape[0]
    floats = FLOATS_AND_DOUBLE
    if mla is not None:
        latent, rope = mla.row_format.latent, mla.row_format.rope
        check_tensor(op, "c_kv", mla.c_kv, floats, (tokens, latent))
        check_tensor(op, "k_pe", mla.k_pe, floats, (tokens, rope))
        if mla.norm_weight is not None:
            check_tensor(op, "norm_weight", mla.norm_weight, floats, (latent,))
        check_pages(op, mla.pages, mla.row_format.planes, page_size)
        check_one_device(op, slots=slots, c_kv=mla.c_kv, k_pe=mla.k_pe, norm_weight=mla.norm_weight, pages=mla.pages)
    if index is not None:
        dim, weight, bias = index.row_format.dim, index.norm_weight, index.norm_bias
        check_tensor(op, "key", index.key, floats, (tokens, dim))
        if weight is not None and bias is not None:
            check_tensor(op, "key norm_weight", weight, floats, (dim,))
            check_tensor(op, "key norm_bias", bias, floats, (dim,))
        elif weight is not bias:
            raise ValueError(f"{op}: the layer norm needs both norm_weight and norm_bias, or neither")
        check_pages(op, index.pages, index.row_format.planes, page_size)
        check_one_device(op, slots=slots, key=index.key, key_weight=weight, key_bias=bias, pages=index.pages)
    if angles is not None:
        check_angles(op, angles, (tokens, ANY if mla is None else mla.row_format.rope // 2))
        if index is not None and 2 * angles.cos.shape[1] > index.row_format.dim:
            raise ValueError(f"{op}: {angles.cos.shape[1]} pairs to rotate in a key of dim={index.row_format.dim}")
        check_one_device(op, slots=slots, cos=angles.cos, sin=angles.sin)
