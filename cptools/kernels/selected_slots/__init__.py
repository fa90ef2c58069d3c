"""Where the selected positions of decode rows lie in this rank's pages."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import KVLayout
from ..impl import Choice, choose, triton_obstacle
from . import reference

__all__ = ["choose_selected_slots", "selected_slots"]


def selected_slots(
    out: Tensor,
    positions: Tensor,
    request_ids: Tensor,
    tables: Tensor,
    *,
    layout: KVLayout,
    rank: int,
    impl: str = "auto",
) -> None:
    """Write the slot of each selected position into out [T, K], int32 or int64; -1 where this rank does not hold it.

    positions int64 [T, K] in the sequence of request ``request_ids[t]`` (integers [T]), negative for none; columns
    stay where they are. tables [R, blocks] page ids. A position beyond its table, a request outside [0, R) and a
    negative page id give -1 too. out's dtype must hold a slot: int32 up to 2^31 rows. Local, on the current stream, no
    sync, may be captured in a CUDA graph.
    """
    if positions.dim() != 2 or out.shape != positions.shape or request_ids.shape != positions.shape[:1]:
        raise ValueError(
            f"selected_slots: want positions [T, K], out alike and request_ids [T], got {tuple(positions.shape)}, "
            f"{tuple(out.shape)}, {tuple(request_ids.shape)}"
        )
    if out.dtype not in (torch.int32, torch.int64) or tables.dim() != 2:
        raise ValueError(
            f"selected_slots: out must be int32 or int64 and tables [R, blocks], "
            f"got {out.dtype} and {tuple(tables.shape)}"
        )
    if choose_selected_slots(positions, tables, impl=impl).impl == "reference":
        reference.selected_slots(out, positions, request_ids, tables, layout=layout, rank=rank)
        return
    from . import triton

    triton.selected_slots(
        out, positions, request_ids, tables, layout.world_size, layout.interleave, layout.page_size, rank
    )


def choose_selected_slots(positions: Tensor, tables: Tensor, *, impl: str = "auto") -> Choice:
    """What `selected_slots` would run for these inputs, and why nothing faster."""
    obstacle = triton_obstacle(positions.device)
    if obstacle is None and any(x.numel() and x.stride(1) != 1 for x in (positions, tables)):
        obstacle = f"positions and tables have strides {positions.stride()} and {tables.stride()}"
    return choose("selected_slots", impl, {"triton": obstacle})
