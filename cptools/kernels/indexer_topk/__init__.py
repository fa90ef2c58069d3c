"""Lightning-indexer scores and their fused top-k."""

from .reference import KEY_TILE, QUERY_TILE, indexer_scores, indexer_topk

__all__ = ["KEY_TILE", "QUERY_TILE", "indexer_scores", "indexer_topk"]
