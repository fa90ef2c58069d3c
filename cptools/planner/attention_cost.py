"""Operations and bytes of sparse MLA and of the indexer: what limits them, and where one overtakes the other."""

from __future__ import annotations

from cptools.integers import require_int
from cptools.planner.kv_cost import RowBytes
from cptools.planner.model_shape import ModelShape

_INDEX_BYTES = 4  # of a selected row's number, int32
_IO_BYTES = 2  # of a value of query or output, BF16


def sparse_mla_flop_per_byte(shape: ModelShape, rows: RowBytes, heads: int) -> float:
    """FLOP per byte moved of one query of ``heads`` heads over its top-k rows, in absorbed form.

    All heads read the same row: its bytes count once, its operations once a head. Bytes are the selected rows and
    their numbers, the query in and the output out.
    """
    require_int("heads", heads, minimum=1)
    moved = shape.index_topk * (rows.mla + _INDEX_BYTES) + heads * _absorbed_dims(shape) * _IO_BYTES
    return sparse_mla_flop(shape, heads) / moved


def sparse_mla_flop(shape: ModelShape, heads: int) -> int:
    """FLOP of one query of ``heads`` heads in one layer, over top-k rows."""
    return 2 * shape.index_topk * heads * _absorbed_dims(shape)


def indexer_crossover_tokens(shape: ModelShape, heads: int) -> int:
    """Prompt length from which the indexers take more FLOP than sparse MLA with ``heads`` heads a rank, to the token.

    Of a whole prompt over all decoder layers, without MTP: a prompt of L tokens scores L * L / 2 pairs in each layer
    that indexes, with all index heads, and attends to L * top-k. Splitting queries divides both and cancels; splitting
    heads divides only the second. The first top-k queries, which attend to fewer, count as all others.
    """
    return _nearest(2 * _attention(shape, heads), _scoring(shape))


def indexer_crossover_decode_tokens(shape: ModelShape, heads: int) -> int:
    """The same for one token that decodes: the context from which its indexers take more FLOP than its attention."""
    return _nearest(_attention(shape, heads), _scoring(shape))


def _attention(shape: ModelShape, heads: int) -> int:
    require_int("heads", heads, minimum=1)
    return shape.num_hidden_layers * sparse_mla_flop(shape, heads)


def _scoring(shape: ModelShape) -> int:
    """FLOP of one (query, key) pair over the decoder layers that index."""
    return shape.num_decoder_index_layers * 2 * shape.index_n_heads * shape.index_head_dim


def _absorbed_dims(shape: ModelShape) -> int:
    """Values of a head's query (latent and rotary part) and of its output (latent)."""
    return 2 * shape.kv_lora_rank + shape.qk_rope_head_dim


def _nearest(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
