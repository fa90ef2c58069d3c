"""The lightning indexer: which cached tokens a query attends to.

iq = qr Wq_b^T (32 heads)    ik = LayerNorm(u Wk^T)    the first rope dims of both rotated
I[s, t] = sum_h w[s, h] H^-0.5 relu(iq[s, h] . ik[t] D^-0.5)
"""

from __future__ import annotations

from torch import Tensor

from cptools.cp_kv import NewKeys
from cptools.kernels.rowwise import linear, linear_in_fp32

from .config import GLM53Config
from .weights import IndexerWeights

KEY_NORM_EPS = 1e-6


def new_keys(u: Tensor, w: IndexerWeights) -> NewKeys:
    """Index keys of the normed layer input u [T, hidden], before norm and rotation."""
    return NewKeys(linear(u, w.wk), w.k_norm_weight, w.k_norm_bias, KEY_NORM_EPS)


def index_query(qr: Tensor, u: Tensor, w: IndexerWeights, config: GLM53Config) -> tuple[Tensor, Tensor]:
    """(query [T, heads, dim] before rotation, head weights [T, heads] float32 with both scales folded in)."""
    heads, dim = config.index_n_heads, config.index_head_dim
    query = linear(qr, w.wq_b).unflatten(1, (heads, dim))
    return query, linear_in_fp32(u, w.weights_proj) * (heads * dim) ** -0.5
