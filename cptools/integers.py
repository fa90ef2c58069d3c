"""The integers of public arguments: what is no integer, a mask or a float included, is refused rather than rounded."""

from __future__ import annotations

import operator


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
