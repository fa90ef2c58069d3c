"""The same model with its sums in another order: what it then answers differently is too close to call."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from models.glm53.weights import DenseFFNWeights, LayerWeights, ModelWeights, MoEWeights


def reversed_sums(w: ModelWeights) -> ModelWeights:
    """The weights of the same function, whose sums over heads and over feed-forward widths run backwards."""
    return replace(w, layers=tuple(_layer(layer) for layer in w.layers))


def _layer(w: LayerWeights) -> LayerWeights:
    heads = w.attention.w_uk.shape[0]
    attention = replace(
        w.attention,
        q_b=w.attention.q_b.unflatten(0, (heads, -1)).flip(0).flatten(0, 1),
        w_uk=w.attention.w_uk.flip(0),
        w_uv=w.attention.w_uv.flip(0),
        o=w.attention.o.unflatten(1, (heads, -1)).flip(1).flatten(1),
    )
    gate_up, down = _widths(w.ffn.gate_up), w.ffn.down.flip(-1)
    if not isinstance(w.ffn, MoEWeights):
        return replace(w, attention=attention, ffn=DenseFFNWeights(gate_up, down))
    shared = DenseFFNWeights(_widths(w.ffn.shared.gate_up), w.ffn.shared.down.flip(-1))
    return replace(w, attention=attention, ffn=replace(w.ffn, gate_up=gate_up, down=down, shared=shared))


def _widths(gate_up: Tensor) -> Tensor:
    return gate_up.unflatten(-2, (2, -1)).flip(-2).flatten(-3, -2)
