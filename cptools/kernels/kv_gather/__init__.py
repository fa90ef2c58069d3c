"""Rows out of pages by slot."""

from .reference import gather_rows

__all__ = ["gather_rows"]
