"""What a plan needs to know of a GPU."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class GpuSpec:
    """Memory and rates of one GPU; decimal units but for memory. Raises ValueError unless all are positive.

    memory_gib: memory of one GPU, GiB. hbm_tb_per_s: its rate, read and written. bf16_tflop_per_s: BF16 matrix
    products. link_gb_per_s: what it receives from its peers when contexts are gathered.
    """

    name: str
    memory_gib: float
    hbm_tb_per_s: float
    bf16_tflop_per_s: float
    link_gb_per_s: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "name" and not (
                isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            ):
                raise ValueError(f"{item.name}={value!r} of GPU {self.name!r} must be a positive number")

    @property
    def ridge_flop_per_byte(self) -> float:
        """FLOP per byte below which memory is the limit and above which matrix products are."""
        return self.bf16_tflop_per_s / self.hbm_tb_per_s


H200 = GpuSpec("h200", memory_gib=139, hbm_tb_per_s=4.3, bf16_tflop_per_s=780, link_gb_per_s=346)
"""Rates as measured on H200s under this library: device copy, 8192^3 product, copy engine between NVLink peers."""


def gpu_from_file(path: str | Path) -> GpuSpec:
    """The GPU of a JSON object with exactly the fields of `GpuSpec`. Raises ValueError, or OSError without a file."""
    try:
        source = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    wanted = {item.name for item in fields(GpuSpec)}
    if not isinstance(source, dict) or source.keys() != wanted:
        got = sorted(source) if isinstance(source, dict) else type(source).__name__
        raise ValueError(f"{path} must be an object of {sorted(wanted)}, got {got}")
    return GpuSpec(**source)
