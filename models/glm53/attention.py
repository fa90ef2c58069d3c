"""MLA in absorbed form: one shared latent row per token, queries folded into its space.

qr   = RMS(u Wqa^T)                  q = qr Wqb^T -> per head [q_nope | q_pe]
c    = u Wkva^T = [c_kv | k_pe]      lat = RMS(c_kv); q_pe, k_pe rotated
score[h, s, t] = (q_nope W_UK[h] . lat[t] + q_pe . k_pe[t]) * qk_head_dim^-0.5
out  = concat_h(softmax_t(score) lat W_UV[h]^T) Wo^T

With TP, H below are this rank's heads, and outputs are its addends to a sum over the TP ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cptools.cp_kv import NewLatents
from cptools.kernels.dense_mha import dense_mha
from cptools.kernels.rowwise import RopeAngles, head_linear, linear, rms_norm, rope_interleaved

from .config import GLM53Config
from .weights import AttentionWeights


def new_latents(u: Tensor, w: AttentionWeights, config: GLM53Config) -> NewLatents:
    """What the cache keeps of the normed layer input u [T, hidden], before norm and rotation."""
    c_kv, k_pe = linear(u, w.kv_a).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=1)
    return NewLatents(c_kv, k_pe, w.kv_a_norm, config.latent_norm_eps)


def query_residual(u: Tensor, w: AttentionWeights, config: GLM53Config) -> Tensor:
    """qr [T, q_lora_rank]: the query latent, which MLA and the indexer share."""
    return rms_norm(linear(u, w.q_a), w.q_a_norm, config.latent_norm_eps)


def query_heads(qr: Tensor, w: AttentionWeights, angles: RopeAngles, config: GLM53Config) -> tuple[Tensor, Tensor]:
    """(q_nope [T, H, nope], q_pe [T, H, rope] rotated)."""
    q = linear(qr, w.q_b).unflatten(1, (-1, config.qk_head_dim))
    q_nope, q_pe = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=2)
    return q_nope, rope_interleaved(q_pe, angles)


def absorb(q_nope: Tensor, q_pe: Tensor, w: AttentionWeights) -> Tensor:
    """Queries in the space of cache rows: [T, H, latent + rope]."""
    latent = w.w_uk.shape[2]
    query = q_nope.new_empty(*q_nope.shape[:2], latent + q_pe.shape[2])
    head_linear(q_nope, w.w_uk, out=query[..., :latent])
    query[..., latent:] = q_pe
    return query


def output(latent: Tensor, w: AttentionWeights) -> Tensor:
    """Attended latents [T, H, latent], floats -> [T, hidden]."""
    values = head_linear(latent.to(w.w_uv.dtype), w.w_uv.transpose(1, 2))
    return linear(values.flatten(1), w.o)


def dense_output(
    q_nope: Tensor, q_pe: Tensor, rows: Tensor, kv_lens: Tensor, w: AttentionWeights, config: GLM53Config
) -> Tensor:
    """A short prompt with keys and values expanded per head, where top-k would select everything -> [T, hidden].

    rows float32 [S, latent + rope]: the cache rows of the whole prompt; kv_lens int64 [T]: the keys each query sees.
    """
    heads = w.w_uk.shape[0]
    lat, k_pe = rows.to(w.w_uv.dtype).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=1)
    k_nope = linear(lat, w.w_uk.flatten(0, 1)).unflatten(1, (heads, config.qk_nope_head_dim))
    keys = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, heads, -1)], dim=2)
    values = linear(lat, w.w_uv.flatten(0, 1)).unflatten(1, (heads, config.v_head_dim))
    query = torch.cat([q_nope, q_pe], dim=2)
    attended, _ = dense_mha(query, keys, values, kv_lens, scale=config.softmax_scale)
    return linear(attended.to(w.w_uv.dtype).flatten(1), w.o)
