"""Selection from groups in Triton's interpreter, with atomics in numpy, in a process of its own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the interpreter is Triton's")


def check_selection(sorted_by: str, k: int) -> None:
    import numpy as np
    import torch

    from cptools.kernels.topk_select import (
        grouped_triton,
        narrowing,
        ranking,
        reference,
        results,
        streaming,
    )
    from tests.kernels import shared_atomics_model as model

    model.install(grouped_triton, narrowing, ranking, results, streaming)

    def by_position(positions, scores):
        order = torch.where(positions < 0, columns, positions).argsort(dim=1, stable=True)
        return positions.gather(1, order), scores.gather(1, order)

    torch.manual_seed(0)
    columns = 70_100
    padded = -(-columns // 512) * 512
    lens = torch.tensor([70_100, 69_999, 66_000, 30_001, 8192, 8191, 100, 0, 2048])
    rows = len(lens)
    order = torch.from_numpy(model.position_of(np.arange(padded)))
    assert torch.equal(order.sort().values, torch.arange(padded))
    normal, rising = torch.randn(rows, columns), torch.arange(float(columns)).expand(rows, -1)
    rare = torch.rand(rows, columns)
    kinds = {
        "normal": normal,
        "ties": (8 * normal).round(),
        "equal": torch.ones(rows, columns),
        "rising": rising,
        "falling": -rising,
        "mostly -inf": torch.where(rare < 0.99, -torch.inf, normal),
        "some NaN": torch.where(rare < 0.2, torch.nan, normal),
        "zeros of both signs": torch.where(rare < 0.5, -0.0, 0.0),
        "in few groups": torch.where(torch.arange(columns) // 512 % 9 == 0, normal + 9, normal),
    }
    for kind, scores in kinds.items():
        seen = torch.arange(padded) < lens.unsqueeze(1)
        stored = torch.nn.functional.pad(scores, (0, padded - columns)).where(seen, -torch.inf)[:, order]
        maxima = stored.view(rows, -1, 16).amax(-1)
        written = torch.arange(padded) < -(-lens.unsqueeze(1) // 512) * 512
        stored = stored.where(written, torch.nan).contiguous()
        maxima = maxima.where(written[:, ::16], torch.nan).contiguous()
        positions, chosen = torch.full((rows, k), 7), torch.full((rows, k), 7.0)
        workspace = torch.full((2 * narrowing.CAPACITY,), 3)
        grouped_triton.select_grouped[(1,)](
            stored, maxima, lens, workspace, positions, chosen, rows, columns, padded, padded // 16, k,
            SORTED=results.SORTED_BY.index(sorted_by),
        )  # fmt: skip
        wanted, best = reference.topk_select(scores, k, lengths=lens)
        if sorted_by != "score":
            wanted, best = by_position(wanted, best)
        if sorted_by == "none":
            positions, chosen = by_position(positions, chosen)
        assert torch.equal(positions, wanted), kind
        assert torch.equal(chosen.nan_to_num(9.0), best.nan_to_num(9.0)), kind


@pytest.mark.parametrize("sorted_by,k", [("none", 2048), ("score", 100), ("position", 2048)])
def test_groups_give_the_best_of_a_row(sorted_by: str, k: int) -> None:
    code = f"from tests.kernels.test_topk_select_grouped_interpreter import check_selection as c; c({sorted_by!r}, {k})"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
