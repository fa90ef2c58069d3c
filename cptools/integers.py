"""The integers of public arguments: what is no integer, a mask or a float included, is refused rather than rounded."""

from __future__ import annotations

import operator
from collections.abc import Mapping


def require_int(name: str, value: object, *, minimum: int | None = None) -> int:
    """``value`` as a Python int; integers of numpy and of 0-d tensors pass. Local.

    Raises ValueError, naming ``name``, for anything else (bools too) and below ``minimum``.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise ValueError(f"{name}={value!r} must be an integer")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}={number} must be >= {minimum}")
    return int(number)


def undivided(name: str, parts: int, sizes: Mapping[str, int]) -> list[str]:
    """What to say of each of ``sizes``, by name, that ``parts`` does not divide. Local."""
    return [f"{name}={parts} must divide {what}={size}" for what, size in sizes.items() if size % parts]
