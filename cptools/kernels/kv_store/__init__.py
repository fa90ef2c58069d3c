"""Rows into pages by slot."""

from .reference import page_planes, store_rows

__all__ = ["page_planes", "store_rows"]
