"""Exact top-k with one total order: score descending, position ascending."""

from .reference import INVALID, decode_order, encode_order, merge_orders, topk_select

__all__ = ["INVALID", "decode_order", "encode_order", "merge_orders", "topk_select"]
