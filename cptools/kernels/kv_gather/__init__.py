"""Rows out of pages: by slot, or whole sequences by block table."""

from .reference import gather_rows, gather_sequences

__all__ = ["gather_rows", "gather_sequences"]
