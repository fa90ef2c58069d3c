"""Norm, rotation, quantisation and store of MLA and index rows in one launch.

A program takes one or a few tokens and either their MLA rows or their index rows (second grid axis). Roundings are
those of the reference: to the dtype of the input after the norm, after its weight, and after each product and the sum
of the rotation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import FP8, FP8_MAX, MIN_SCALE, SCALE_BLOCK
from ..arguments import aligned, dense
from ..compile_spec import CompileSpec
from ..dependent_launch import overlapped, wait_for_inputs

FP8_LIMIT = tl.constexpr(FP8_MAX)
SCALE_FLOOR = tl.constexpr(MIN_SCALE)

EXACT = {"enable_fp_fusion": False}
"""A product in BF16 that is fused with a sum is not rounded in between, as torch rounds it."""

RESIDENT_PROGRAMS = 1056
"""Eight an SM of an H200: so many leave room for those of the next kernel."""

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, FP8: tl.float8e4nv}


@triton.jit
def quantize(x, POWER_OF_TWO: tl.constexpr):
    """x [B, R, 128] fp32 -> (values for e4m3 in fp32, scales [B, R]). The conversion to e4m3 clamps."""
    # Compared as bits, in which NaN is the largest; a warp has one instruction for the maximum of integers.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=2)
    floor = tl.full(amax.shape, SCALE_FLOOR, tl.float32).to(tl.int32, bitcast=True)
    if POWER_OF_TWO:
        # amax / 448, rounded up to 2^e, without a division: 448 is 1.75 * 2^8, and amax rounds up to the next power
        # where its mantissa is above 1.75, by one bit already: (1.75 + 2^-23) / 1.75 rounds to more than 1.
        finite = amax < 0x7F800000
        rounded = ((amax + 0x1FFFFF) & -0x800000) - (8 << 23)
        rounded = tl.maximum(rounded, (floor + 0x7FFFFF) & -0x800000)
        # 1 / 2^e exactly; x / inf is 0 or NaN, as x * 0; x / NaN is NaN.
        special = tl.where(amax == 0x7F800000, 0, 0x7FFFFFFF)
        inverse = tl.where(finite, 0x7F000000 - rounded, special)
        scale = tl.where(finite, rounded, 0x7F800000 | special).to(tl.float32, bitcast=True)
        values = x * inverse.to(tl.float32, bitcast=True)[:, :, None]
    else:
        amax = amax.to(tl.float32, bitcast=True)
        bits = tl.div_rn(amax, tl.full(amax.shape, FP8_LIMIT, tl.float32)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = tl.maximum(bits, floor).to(tl.float32, bitcast=True)
        values = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape))
    return values, scale


@triton.jit
def rotate(x, cos, sin, row, live, stride, PAIRS: tl.constexpr, ROTATED: tl.constexpr):
    """x [R, 2 * PAIRS] with its first ROTATED pairs (2i, 2i + 1) rotated, rounded to its dtype at each step."""
    pair = tl.arange(0, PAIRS)[None, :]
    mask = live[:, None] & (pair < ROTATED)
    c = tl.load(cos + row[:, None] * stride + pair, mask=mask, other=1.0).to(x.dtype).to(tl.float32)
    s = tl.load(sin + row[:, None] * stride + pair, mask=mask, other=0.0).to(x.dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [x.shape[0], PAIRS, 2]))
    e, o = even.to(tl.float32), odd.to(tl.float32)
    first = (e * c).to(x.dtype).to(tl.float32) - (o * s).to(x.dtype).to(tl.float32)
    second = (o * c).to(x.dtype).to(tl.float32) + (e * s).to(x.dtype).to(tl.float32)
    first = tl.where(pair < ROTATED, first.to(x.dtype), even)
    second = tl.where(pair < ROTATED, second.to(x.dtype), odd)
    return tl.reshape(tl.join(first, second), [x.shape[0], 2 * PAIRS])


@triton.jit
def store_mla(
    c_kv,
    k_pe,
    weight,
    cos,
    sin,
    pages,
    row,
    live,
    page,
    offset,
    used,
    c_stride,
    k_stride,
    angle_stride,
    page_stride,
    eps,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    LATENT: tl.constexpr = BLOCKS * BLOCK
    # Tokens stand in the middle, so that warps are spread over tokens and every sum stays inside a warp.
    at = tl.arange(0, BLOCKS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    x = tl.load(c_kv + (row * c_stride)[None, :, None] + at, mask=live[None, :, None], other=0.0)
    rope_at = tl.arange(0, ROPE)[None, :]
    rope = tl.load(k_pe + (row * k_stride)[:, None] + rope_at, mask=live[:, None], other=0.0)
    if NORM:
        # One weight per value, so that no exchange between threads follows the load.
        w = tl.load(weight + tl.broadcast_to(at, x.shape))
        wide = x.to(tl.float32)
        mean = tl.sum(tl.sum(wide * wide, axis=2), axis=0) / LATENT
        normed = (wide * tl.rsqrt(mean + eps)[None, :, None]).to(x.dtype)
        # A product of two dtypes is float32, as torch promotes it, and rounded to that of the input.
        if w.dtype == x.dtype:
            x = normed * w
        else:
            x = (normed.to(tl.float32) * w.to(tl.float32)).to(normed.dtype)
    if ROTATE:
        rope = rotate(rope, cos, sin, row, live, angle_stride, ROPE // 2, ROPE // 2)

    if ROW == tl.float8e4nv:
        base = pages + page * page_stride + offset * (LATENT + 4 * BLOCKS + 2 * ROPE)
        values, scale = quantize(x.to(tl.float32), POWER_OF_TWO)
        to = base.to(tl.pointer_type(tl.float8e4nv))[None, :, None] + at
        tl.store(to, values.to(tl.float8e4nv), mask=used[None, :, None])
        scales = (base + LATENT).to(tl.pointer_type(tl.float32))[None, :] + tl.arange(0, BLOCKS)[:, None]
        tl.store(scales, scale, mask=used[None, :])
        rope_to = (base + LATENT + 4 * BLOCKS).to(tl.pointer_type(tl.bfloat16))[:, None] + rope_at
        tl.store(rope_to, rope.to(tl.bfloat16), mask=used[:, None])
    else:
        base = pages + page * page_stride + offset * ((LATENT + ROPE) * (ROW.primitive_bitwidth // 8))
        base = base.to(tl.pointer_type(ROW))
        tl.store(base[None, :, None] + at, x.to(ROW), mask=used[None, :, None])
        tl.store(base[:, None] + LATENT + rope_at, rope.to(ROW), mask=used[:, None])


@triton.jit
def store_index(
    key,
    weight,
    bias,
    cos,
    sin,
    pages,
    row,
    live,
    page,
    offset,
    used,
    key_stride,
    angle_stride,
    page_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    ROW: tl.constexpr,
    NORM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    BLOCKS: tl.constexpr = DIM // BLOCK
    col = tl.arange(0, DIM)
    x = tl.load(key + (row * key_stride)[:, None] + col[None, :], mask=live[:, None], other=0.0)
    if NORM:
        w = tl.load(weight + tl.broadcast_to(col[None, :], x.shape)).to(tl.float32)
        b = tl.load(bias + tl.broadcast_to(col[None, :], x.shape)).to(tl.float32)
        wide = x.to(tl.float32)
        centred = wide - (tl.sum(wide, axis=1) / DIM)[:, None]
        variance = tl.sum(centred * centred, axis=1) / DIM
        x = (centred * tl.rsqrt(variance + eps)[:, None] * w + b).to(x.dtype)
    if ROTATED > 0:
        x = rotate(x, cos, sin, row, live, angle_stride, DIM // 2, ROTATED)

    if ROW == tl.float8e4nv:
        base = pages + page * page_stride
        # [R, B, 128] read as [1, R * B, 128]
        values, scale = quantize(tl.reshape(x.to(tl.float32), [1, x.shape[0] * BLOCKS, BLOCK]), POWER_OF_TWO)
        to = (base + offset * DIM).to(tl.pointer_type(tl.float8e4nv))[:, None] + col[None, :]
        tl.store(to, tl.reshape(values, [x.shape[0], DIM]).to(tl.float8e4nv), mask=used[:, None])
        scales = (base + PAGE_SIZE * DIM + offset * (4 * BLOCKS)).to(tl.pointer_type(tl.float32))
        scales = scales[:, None] + tl.arange(0, BLOCKS)[None, :]
        tl.store(scales, tl.reshape(scale, [x.shape[0], BLOCKS]), mask=used[:, None])
    else:
        base = pages + page * page_stride + offset * (DIM * (ROW.primitive_bitwidth // 8))
        tl.store(base.to(tl.pointer_type(ROW))[:, None] + col[None, :], x.to(ROW), mask=used[:, None])


@triton.jit
def norm_rope_store_kernel(
    slots,
    cos,
    sin,
    c_kv,
    k_pe,
    mla_weight,
    mla_pages,
    key,
    key_weight,
    key_bias,
    index_pages,
    tokens,
    num_slots,
    angle_stride,
    c_stride,
    k_stride,
    key_stride,
    mla_page_stride,
    index_page_stride,
    mla_eps,
    key_eps,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    MLA_ROW: tl.constexpr,
    INDEX_ROW: tl.constexpr,
    MLA_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    MLA_POWER_OF_TWO: tl.constexpr,
    INDEX_POWER_OF_TWO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCKS == 0 leaves out the MLA rows, DIM == 0 the index rows, ROTATED (pairs) == 0 the rotation."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tokens
    wait_for_inputs(OVERLAP, EARLY)
    slot = tl.load(slots + row, mask=live, other=-1).to(tl.int64)
    used = (slot >= 0) & (slot < num_slots)
    # Slots that are used fit 32 bits: fewer instructions between the slot and the store.
    short = slot.to(tl.uint32)
    page, offset = (short // PAGE_SIZE).to(tl.int64), (short % PAGE_SIZE).to(tl.int64)
    if BLOCKS > 0:
        if DIM == 0 or tl.program_id(1) == 0:
            store_mla(
                c_kv, k_pe, mla_weight, cos, sin, mla_pages, row, live, page, offset, used,
                c_stride, k_stride, angle_stride, mla_page_stride, mla_eps,
                BLOCKS, BLOCK, ROPE, MLA_ROW, MLA_NORM, ROTATED > 0, MLA_POWER_OF_TWO,
            )  # fmt: skip
    if DIM > 0:
        if BLOCKS == 0 or tl.program_id(1) == 1:
            store_index(
                key, key_weight, key_bias, cos, sin, index_pages, row, live, page, offset, used,
                key_stride, angle_stride, index_page_stride, key_eps,
                DIM, BLOCK, ROTATED, INDEX_ROW, KEY_NORM, PAGE_SIZE, INDEX_POWER_OF_TWO,
            )  # fmt: skip


@torch.library.custom_op("cptools::norm_rope_store", mutates_args=("mla_pages", "index_pages"))
def norm_rope_store(
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    c_kv: Tensor | None,
    k_pe: Tensor | None,
    mla_weight: Tensor | None,
    mla_pages: Tensor | None,
    key: Tensor | None,
    key_weight: Tensor | None,
    key_bias: Tensor | None,
    index_pages: Tensor | None,
    mla_dtype: torch.dtype,
    index_dtype: torch.dtype,
    mla_eps: float,
    key_eps: float,
    mla_power_of_two: bool,
    index_power_of_two: bool,
    page_size: int,
) -> None:
    """As ``cptools.kernels.norm_rope_store.norm_rope_store``; a part whose pages are None is left out."""
    tokens = slots.shape[0]
    pages = mla_pages if mla_pages is not None else index_pages
    if tokens == 0 or pages is None:
        return
    roles = (mla_pages is not None) + (index_pages is not None)
    per_program, warps = tile(tokens, mla_pages is not None, index_pages is not None)
    programs = triton.cdiv(tokens, per_program)
    num_pages = min(p.shape[0] for p in (mla_pages, index_pages) if p is not None)
    # Only a trace of torch.compile, which has no addresses, brings pages to here that are not aligned.
    homes = mla_pages, index_pages
    mla_pages, index_pages = (None if home is None else aligned(home, 4) for home in homes)
    norm_rope_store_kernel[(programs, roles)](
        dense(slots),
        *(cos, sin, c_kv, k_pe, mla_weight, mla_pages, key, key_weight, key_bias, index_pages),
        tokens,
        num_pages * page_size,
        *(0 if x is None else x.stride(0) for x in (cos, c_kv, k_pe, key, mla_pages, index_pages)),
        mla_eps,
        key_eps,
        BLOCKS=0 if c_kv is None else c_kv.shape[1] // SCALE_BLOCK,
        BLOCK=SCALE_BLOCK,
        ROPE=0 if k_pe is None else k_pe.shape[1],
        DIM=0 if key is None else key.shape[1],
        ROTATED=0 if cos is None else cos.shape[1],
        MLA_ROW=ELEMENTS[mla_dtype],
        INDEX_ROW=ELEMENTS[index_dtype],
        MLA_NORM=mla_weight is not None,
        KEY_NORM=key_weight is not None,
        MLA_POWER_OF_TWO=mla_power_of_two,
        INDEX_POWER_OF_TWO=index_power_of_two,
        PAGE_SIZE=page_size,
        ROWS=per_program,
        num_warps=warps,
        **EXACT,
        **overlapped(pages, early=programs <= RESIDENT_PROGRAMS),
    )
    for home, used in zip(homes, (mla_pages, index_pages), strict=True):
        if home is not None and used is not None and used is not home:
            home.copy_(used)


@norm_rope_store.register_fake
def fake_norm_rope_store(*args: object) -> None:
    pass


def tile(tokens: int, mla: bool, index: bool) -> tuple[int, int]:
    """(tokens, warps) of a program: the fastest on an H200 at 1, 128, 1024 and 4096 tokens."""
    if tokens <= 256:
        return 1, 1
    if tokens <= 2048 or not index:
        return 4, 4
    return (4, 2) if mla else (8, 4)


def compile_specs() -> list[CompileSpec]:
    pointers = {"slots": "*i64", "cos": "*fp32", "sin": "*fp32"}
    pointers |= dict.fromkeys(["c_kv", "k_pe", "mla_weight"], "*bf16") | {"mla_pages": "*u8"}
    pointers |= dict.fromkeys(["key", "key_weight", "key_bias"], "*bf16") | {"index_pages": "*u8"}
    sizes = ["tokens", "num_slots", "angle_stride", "c_stride", "k_stride", "key_stride"]
    sizes += ["mla_page_stride", "index_page_stride"]
    signature = pointers | dict.fromkeys(sizes, "i32") | {"mla_eps": "fp32", "key_eps": "fp32"}
    specs = []
    for name, mla, index, exact in (
        ("fp8", tl.float8e4nv, tl.float8e4nv, True),
        ("fp8_any_scale", tl.float8e4nv, tl.float8e4nv, False),
        ("bf16", tl.bfloat16, tl.bfloat16, True),
        ("fp32", tl.float32, tl.float32, True),
    ):
        parts = ((True, True), (True, False), (False, True))
        for per_program, warps in sorted({tile(tokens, *part) for tokens in (1, 1024, 4096) for part in parts}):
            constexprs = {
                "BLOCKS": 4, "BLOCK": SCALE_BLOCK, "ROPE": 64, "DIM": 128, "ROTATED": 32, "MLA_ROW": mla,
                "INDEX_ROW": index, "MLA_NORM": True, "KEY_NORM": True, "MLA_POWER_OF_TWO": exact,
                "INDEX_POWER_OF_TWO": exact, "PAGE_SIZE": 64, "ROWS": per_program, "OVERLAP": True, "EARLY": True,
            }  # fmt: skip
            specs.append(
                CompileSpec(
                    name=f"norm_rope_store-{name}-{per_program}rows-{warps}warps",
                    fn=norm_rope_store_kernel,
                    signature=signature | dict.fromkeys(constexprs, "constexpr"),
                    constexprs=constexprs,
                    num_warps=warps,
                    options=EXACT | {"launch_pdl": True},
                    divisible_by_16=(*pointers, *sizes[2:]),
                )
            )
    return specs
