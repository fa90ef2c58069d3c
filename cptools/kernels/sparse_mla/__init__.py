"""Absorbed MLA attention over selected rows."""

from .reference import QUERY_TILE, sparse_mla

__all__ = ["QUERY_TILE", "sparse_mla"]
