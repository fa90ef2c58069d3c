"""How the fused selection cuts its workspace: a ring of blocks of whole rows."""

import pytest

pytest.importorskip("triton", reason="the ring stands beside the kernels that use it")

from cptools.kernels.indexer_topk.blocks_gluon import ring_of, row_stride


@pytest.mark.parametrize("rows", [1, 4, 7, 130, 2048, 100_000])
@pytest.mark.parametrize("columns", [1, 64, 1000, 131_072, 1 << 20, 1 << 26])
@pytest.mark.parametrize("workspace", [0, 1, 1 << 20, 320 << 20])
def test_a_ring_fits_its_workspace_or_is_none(rows: int, columns: int, workspace: int) -> None:
    slots, block = ring_of(rows, columns, workspace)
    row_bytes = 4 * row_stride(columns) // 16 * 17  # scores, and maxima of 16 each
    assert slots * block * row_bytes <= workspace
    assert block % 4 == 0
    assert slots != 1
    assert (slots > 0) == (workspace >= 8 * row_bytes)
    assert block < rows + 4
