"""Names of block-FP8 scales as released."""

from __future__ import annotations


def scale_name(weight_name: str) -> str:
    return weight_name + "_scale_inv"
