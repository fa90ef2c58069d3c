"""Sparse MLA over BF16 rows of 512 + 64 columns on Hopper, in Gluon."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import aligned
from ..compile_spec import CompileSpec
from .gluon_relay import sparse_mla_kernel

HEAD_TILE = 64
V_DIM = 512
CONSUMER_REGISTERS = 216
PRODUCER_REGISTERS = 72


def query_like(query: Tensor) -> Tensor:
    """The query as the kernel reads it: 16-byte pieces of a head at multiples of 16 elements."""
    aligned = query.stride(2) == 1 and query.stride(1) % 16 == 0 and query.stride(0) % 16 == 0
    return query if aligned and query.data_ptr() % 16 == 0 else query.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("cptools::sparse_mla_gluon", mutates_args=())
def sparse_mla_gluon(
    query: Tensor, rows: Tensor, ids: Tensor, counts: Tensor | None, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """query [T, H, 576], rows [S, 576] bfloat16, ids [T, K] -> (out [T, H, 512] of out_dtype, lse [T, H] float32).

    counts [T], if given: only so many of the first ids of a query are looked at.
    """
    tokens, heads, _ = query.shape
    out = torch.empty(tokens, heads, V_DIM, dtype=out_dtype, device=query.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if tokens == 0 or heads == 0:
        return out, lse
    query, rows = query_like(query), aligned(rows, 16)
    ids = ids if ids.stride(1) == 1 else ids.contiguous()
    head_tiles = -(-heads // HEAD_TILE)
    jobs = tokens * head_tiles
    programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    sparse_mla_kernel[(min(jobs, programs),)](
        query,
        rows,
        ids,
        ids if counts is None else counts,
        out,
        lse,
        scale,
        heads,
        head_tiles,
        rows.shape[0],
        ids.shape[1],
        query.stride(0),
        query.stride(1),
        rows.stride(0),
        ids.stride(0),
        jobs,
        HAS_COUNTS=counts is not None,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )
    return out, lse


@sparse_mla_gluon.register_fake
def sparse_mla_gluon_fake(
    query: Tensor, rows: Tensor, ids: Tensor, counts: Tensor | None, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(tokens, heads, V_DIM, dtype=out_dtype), query.new_empty(tokens, heads, dtype=torch.float32)


def compile_specs() -> list[CompileSpec]:
    integers = "heads head_tiles num_rows columns query_stride_t query_stride_h row_stride ids_stride jobs".split()
    constexprs = {
        "HAS_COUNTS": False,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    return [
        CompileSpec(
            name=f"sparse_mla_relay_{ids}_ids_{out}_out{'_counts' * counts}",
            fn=sparse_mla_kernel,
            signature={
                **{"query": "*bf16", "rows": "*bf16", "ids": f"*{ids}", "counts": "*i32", "out": f"*{out}"},
                **{"lse": "*fp32", "scale": "fp32"},
                **dict.fromkeys(integers, "i32"),
                **dict.fromkeys(constexprs, "constexpr"),
            },
            constexprs=constexprs | {"HAS_COUNTS": counts},
            gluon=True,
            divisible_by_16=tuple("query rows ids counts out lse query_stride_t query_stride_h row_stride".split()),
        )
        for ids, out, counts in [("i32", "bf16", False), ("i64", "fp32", False), ("i32", "bf16", True)]
    ]
