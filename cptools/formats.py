"""Row formats: the bytes of one token in one layer's cache.

A format knows three things: how many bytes a row has, how float values become these bytes and back, and in which
*planes* a page of rows is stored (an FP8 index page holds all keys, then all scales; every other page is rows back to
back). Byte layouts follow FlashMLA's ``fp8_ds_mla`` row and DeepGEMM's paged index keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .integers import require_int

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE_BLOCK = 128  # values that share one FP8 scale
MIN_SCALE = 1e-4  # floor of amax / 448, so that an all-zero block has a finite, exact scale

_FLOATS = (torch.float32, torch.bfloat16)


def fp8_scale(amax: Tensor, *, power_of_two: bool = True) -> Tensor:
    """Scale of a block whose largest magnitude is ``amax`` (float32, any shape): values / scale fit e4m3.

    A power of two, 2^ceil(log2(max(amax / 448, 1e-4))), is exact in every reader (some round scales to bf16) and makes
    quantisation commute with products. Computed with frexp, so that no rounding of a logarithm moves it. Local.
    """
    scale = torch.clamp(amax.float() / FP8_MAX, min=MIN_SCALE)
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exact = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(torch.isfinite(scale), exact, scale)  # NaN and inf stay visible


def quantize_fp8(x: Tensor, *, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Blockwise e4m3 along the last dim: x [..., D] -> (values [..., D] e4m3, scales [..., ceil(D/128)] float32)."""
    dim = x.shape[-1]
    blocks = -(-dim // SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * SCALE_BLOCK - dim))
    tiles = padded.unflatten(-1, (blocks, SCALE_BLOCK))
    scale = fp8_scale(tiles.abs().amax(-1), power_of_two=power_of_two)
    values = torch.clamp(tiles / scale.unsqueeze(-1), -FP8_MAX, FP8_MAX).flatten(-2)[..., :dim]
    return values.to(FP8), scale


def dequantize_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Inverse of :func:`quantize_fp8`: float32 [..., D]."""
    dim = values.shape[-1]
    return values.float() * scale.repeat_interleave(SCALE_BLOCK, -1)[..., :dim]


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in (*_FLOATS, FP8):
        raise ValueError(f"{name}: dtype={dtype} is not one of float32, bfloat16, float8_e4m3fn")


def _check_rows(rows: Tensor, row_bytes: int) -> None:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row_bytes:
        raise ValueError(f"rows must be uint8 [T, {row_bytes}], got {rows.dtype} {tuple(rows.shape)}")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _from_bytes(rows: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    # A copy even where the piece is contiguous, as in a single row: an odd offset can not be viewed as a wider type.
    piece = rows[:, start:stop].clone(memory_format=torch.contiguous_format)
    return piece.view(-1).view(dtype).view(rows.shape[0], (stop - start) // dtype.itemsize)


@dataclass(frozen=True)
class MlaRows:
    """One token's MLA row: the normed latent, then the rotated key part (interleaved pairs, in place).

    float32 and bfloat16 rows are the values back to back. An FP8 row holds ``latent`` e4m3 bytes, one float32 scale per
    128 of them, and the rotary part in bfloat16.
    """

    latent: int
    rope: int
    dtype: torch.dtype
    power_of_two_scales: bool = True
    row_bytes: int = field(init=False)
    planes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_dtype("MlaRows", self.dtype)
        require_int("latent", self.latent, minimum=1)
        require_int("rope", self.rope, minimum=0)
        if self.dtype == FP8:
            row_bytes = self.latent + 4 * self.num_scales + 2 * self.rope
        else:
            row_bytes = (self.latent + self.rope) * self.dtype.itemsize
        object.__setattr__(self, "row_bytes", row_bytes)
        object.__setattr__(self, "planes", (row_bytes,))

    @property
    def num_scales(self) -> int:
        return -(-self.latent // SCALE_BLOCK) if self.dtype == FP8 else 0

    def pack(self, latent: Tensor, rope: Tensor) -> Tensor:
        """latent [T, latent], rope [T, rope] of any float dtype -> uint8 [T, row_bytes]. Local."""
        if latent.dim() != 2 or latent.shape[1] != self.latent or rope.shape != (latent.shape[0], self.rope):
            raise ValueError(
                f"MlaRows.pack: want [T, {self.latent}] and [T, {self.rope}], "
                f"got {tuple(latent.shape)} and {tuple(rope.shape)}"
            )
        if self.dtype != FP8:
            return _bytes(torch.cat([latent.to(self.dtype), rope.to(self.dtype)], dim=1))
        values, scale = quantize_fp8(latent, power_of_two=self.power_of_two_scales)
        return torch.cat([_bytes(values), _bytes(scale), _bytes(rope.to(torch.bfloat16))], dim=1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [T, row_bytes] -> (latent [T, latent], rope [T, rope]) float32: what a kernel reads. Local."""
        joint = self.unpack_joint(rows)
        return joint[:, : self.latent], joint[:, self.latent :]

    def unpack_joint(self, rows: Tensor) -> Tensor:
        """uint8 [T, row_bytes] -> float32 [T, latent + rope], the key of absorbed attention. Local."""
        _check_rows(rows, self.row_bytes)
        if self.dtype == torch.float32 and rows.is_contiguous() and rows.storage_offset() % 4 == 0:
            return rows.view(torch.float32)
        if self.dtype != FP8:
            return _from_bytes(rows, 0, self.row_bytes, self.dtype).float()
        scales_at, rope_at = self.latent, self.latent + 4 * self.num_scales
        latent = dequantize_fp8(
            _from_bytes(rows, 0, scales_at, FP8), _from_bytes(rows, scales_at, rope_at, torch.float32)
        )
        return torch.cat([latent, _from_bytes(rows, rope_at, self.row_bytes, torch.bfloat16).float()], dim=1)


@dataclass(frozen=True)
class IndexRows:
    """One token's indexer key. An FP8 row is ``dim`` e4m3 bytes and one float32 scale per 128 of them.

    ``planes`` says how a page stores rows: FP8 pages hold all keys of the page, then all scales.
    """

    dim: int
    dtype: torch.dtype
    power_of_two_scales: bool = True
    row_bytes: int = field(init=False)
    planes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_dtype("IndexRows", self.dtype)
        require_int("dim", self.dim, minimum=1)
        if self.dtype == FP8:
            planes: tuple[int, ...] = (self.dim, 4 * -(-self.dim // SCALE_BLOCK))
        else:
            planes = (self.dim * self.dtype.itemsize,)
        object.__setattr__(self, "row_bytes", sum(planes))
        object.__setattr__(self, "planes", planes)

    def pack(self, keys: Tensor) -> Tensor:
        """keys [T, dim] of any float dtype -> uint8 [T, row_bytes]. Local."""
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"IndexRows.pack: want [T, {self.dim}], got {tuple(keys.shape)}")
        if self.dtype != FP8:
            return _bytes(keys.to(self.dtype))
        values, scale = quantize_fp8(keys, power_of_two=self.power_of_two_scales)
        return torch.cat([_bytes(values), _bytes(scale)], dim=1)

    def unpack(self, rows: Tensor) -> Tensor:
        """uint8 [T, row_bytes] -> float32 keys [T, dim]. Local."""
        _check_rows(rows, self.row_bytes)
        if self.dtype != FP8:
            return _from_bytes(rows, 0, self.row_bytes, self.dtype).float()
        return dequantize_fp8(
            _from_bytes(rows, 0, self.dim, FP8), _from_bytes(rows, self.dim, self.row_bytes, torch.float32)
        )

    def round_query(self, query: Tensor) -> Tensor:
        """The query [..., dim] as the scoring kernel sees it: FP8 rows imply FP8 queries, one scale per head.

        ReLU commutes with a positive scale, so an engine folds the scale into the head weight. The scale is a power of
        two whatever the rows' is, so that this is bit-equal to the float32 query returned here. Other formats leave
        the query as it is. Local.
        """
        if self.dtype != FP8:
            return query
        return dequantize_fp8(*quantize_fp8(query))


BF16_MLA = MlaRows(512, 64, torch.bfloat16)
FP8_MLA = MlaRows(512, 64, FP8)
FP8_INDEX = IndexRows(128, FP8)
