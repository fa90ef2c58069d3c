"""Where the selected positions of decode rows lie in this rank's pages."""

from __future__ import annotations

from torch import Tensor

from ...layout import KVLayout
from ..arguments import ANY, check_integers, check_one_device
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

    positions integers [T, K] in the sequence of request ``request_ids[t]`` (integers [T]), negative for none; columns
    stay where they are. tables [R, blocks] page ids. A position beyond its table, a request outside [0, R) and a
    negative page id give -1 too, and so does a position from 2^31 on in the kernel. out's dtype must hold a slot: int32
    up to 2^31 rows. Local, on the current stream, no sync, may be captured in a CUDA graph.

    Raises ValueError where shapes, dtypes or devices do not fit, and for a rank outside the layout.
    """
    op = "selected_slots"
    check_integers(op, "positions", positions, (ANY, ANY))
    check_integers(op, "out", out, positions.shape)
    check_integers(op, "request_ids", request_ids, positions.shape[:1])
    check_integers(op, "tables", tables, (ANY, ANY))
    check_one_device(op, out=out, positions=positions, request_ids=request_ids, tables=tables)
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"{op}: rank={rank} is outside world_size={layout.world_size}")
    if choose_selected_slots(positions, tables, impl=impl).impl == "reference":
        reference.selected_slots(out, positions, request_ids, tables, layout=layout, rank=rank)
        return
    from . import triton

    triton.selected_slots(
        out, positions, request_ids, tables, layout.world_size, layout.interleave, layout.page_size, rank
    )


def choose_selected_slots(positions: Tensor, tables: Tensor, *, impl: str = "auto") -> Choice:
    """What `selected_slots` would run for these inputs, and why nothing faster."""
    return choose("selected_slots", impl, {"triton": triton_obstacle(positions.device)})
