"""Attention over part of the keys, and the exact merge of such parts on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.kernels.lse_merge import merge_states


@dataclass
class Partial:
    """Attention output over part of the keys, with the log-sum-exp that lets parts be merged exactly.

    Empty means lse == -inf: no key of the part was visible to the query. What `out` holds there is never read.
    Other conventions enter only through `from_base2` and `from_posinf_empty`.

    Args:
        out: [T, H, D] of any float dtype.
        lse: [T, H] float32 on the same device, natural log of the sum of exp(scaled scores).

    Raises:
        ValueError: shapes, dtypes or devices do not fit. Values are not looked at.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        if self.out.dim() != 3 or not self.out.is_floating_point():
            raise ValueError(f"out must be floating [T, H, D], got {self.out.dtype} {tuple(self.out.shape)}")
        if self.lse.dtype != torch.float32 or self.lse.shape != self.out.shape[:2]:
            raise ValueError(
                f"lse must be float32 {tuple(self.out.shape[:2])} for out {tuple(self.out.shape)}, "
                f"got {self.lse.dtype} {tuple(self.lse.shape)}"
            )
        if self.lse.device != self.out.device:
            raise ValueError(f"out is on {self.out.device}, lse on {self.lse.device}")

    @classmethod
    def from_base2(cls, out: Tensor, lse2: Tensor) -> Partial:
        """From a kernel that returns the base-2 logarithm (FlashInfer and TensorRT-LLM MLA): lse = lse2 * ln 2. Local.

        Args:
            out: [T, H, D]. lse2: [T, H], -inf for empty.
        """
        # In fp64, so that the change of base costs one rounding.
        return cls(out, (lse2.double() * math.log(2.0)).float())

    @classmethod
    def from_posinf_empty(cls, out: Tensor, lse: Tensor) -> Partial:
        """From a kernel that marks empty with lse = +inf and is natural otherwise (FlashMLA, FlashAttention 2). Local.

        Args:
            out: [T, H, D]. lse: [T, H] (FlashMLA gives heads before queries: transpose it).
        """
        return cls(out, torch.where(torch.isposinf(lse), -torch.inf, lse).float())

    @classmethod
    def empty(
        cls,
        tokens: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Partial:
        """The part without keys, neutral in every merge: out 0, lse -inf. Local."""
        return cls(
            torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device),
            torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=device),
        )


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint parts of the keys, added in list order in fp32. Local; no sync on CUDA.

    Empty parts contribute nothing; all empty gives out 0, lse -inf. One part that is not empty comes back bit by bit.
    NaN in an lse, or in the out of a part that is not empty, stays visible. The arithmetic and its reason:
    `cptools.kernels.lse_merge.merge_states`.

    Returns:
        A new Partial, its out in the dtype of the parts' if that is one, else fp32.

    Raises:
        ValueError: no parts, shapes or devices that differ, or, on the CPU, +inf in an lse (elsewhere it gives NaN).
    """
    if not partials:
        raise ValueError("merge_partials needs at least one partial, got 0")
    first = partials[0]
    for i, partial in enumerate(partials):
        if partial.out.shape != first.out.shape or partial.out.device != first.out.device:
            raise ValueError(
                f"partial {i} is {tuple(partial.out.shape)} on {partial.out.device}, "
                f"partial 0 is {tuple(first.out.shape)} on {first.out.device}"
            )
        if partial.lse.device.type == "cpu" and (count := int(torch.isposinf(partial.lse).sum())):
            raise ValueError(f"partial {i} has lse=+inf in {count} of {partial.lse.numel()} places")
    dtypes = {p.out.dtype for p in partials}
    out_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Partial(*merge_states([p.out for p in partials], [p.lse for p in partials], out_dtype=out_dtype))
