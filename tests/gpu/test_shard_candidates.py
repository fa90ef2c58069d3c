"""The kernels around the exchange of candidates against their references, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cptools.kernels.shard_candidates import choose_shard_candidates, chosen_positions, encode_candidates
from cptools.layout import KVLayout

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [1, 16, 500, 2048, 4096])
@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (2, 1), (3, 4), (8, 64)])
def test_orders_and_positions(world_size: int, interleave: int, k: int) -> None:
    layout = KVLayout(world_size, interleave, 64)
    for rows in (0, 1, 65):
        positions = torch.stack(
            [torch.randperm(1 << 17, device="cuda")[:k] for _ in range(rows)] or [torch.empty(0, k)]
        )
        positions = positions.long().cuda().view(rows, k)
        scores = torch.randn(rows, k, device="cuda")
        special = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-40, -1e-40], device="cuda")
        for column, value in enumerate(special[:k]):
            scores[:, column] = value
        positions[:, k // 2 :: 3] = -1
        assert choose_shard_candidates(positions).impl == "triton"
        given = {"layout": layout, "rank": world_size - 1}
        want = encode_candidates(positions, scores, **given, impl="reference")
        assert torch.equal(encode_candidates(positions, scores, **given), want)
        assert torch.equal(chosen_positions(want), chosen_positions(want, impl="reference"))
