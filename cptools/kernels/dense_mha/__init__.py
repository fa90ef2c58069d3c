"""Causal multi-head attention over whole short prompts."""

from .reference import dense_mha

__all__ = ["dense_mha"]
