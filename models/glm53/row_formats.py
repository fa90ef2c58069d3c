"""How the model's rows are cached."""

from __future__ import annotations

import torch

from cptools.formats import FP8, IndexRows, MlaRows

from .config import GLM53Config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}


def row_formats(config: GLM53Config, kv_rows: str) -> tuple[MlaRows, IndexRows]:
    """Formats of latents and of index keys. Raises ValueError unless ``kv_rows`` is "fp32", "bf16" or "fp8"."""
    if kv_rows not in _DTYPES:
        raise ValueError(f"kv_rows={kv_rows!r} is not one of {', '.join(_DTYPES)}")
    dtype = _DTYPES[kv_rows]
    return MlaRows(config.kv_lora_rank, config.qk_rope_head_dim, dtype), IndexRows(config.index_head_dim, dtype)
