"""The benchmark of several GPUs runs on ranks without them, and tells a split that is wrong from one that is not."""

from __future__ import annotations

from datetime import timedelta

import torch

from benchmarks.layer_scaling import Difference, Setting, measure, name, sizes_of
from cptools import ParallelConfig
from tests.checkpoints import TINY
from tests.ranks.harness import run_ranks

SPLITS = ("tp=2", "pcp=2,ep=2", "pcp=2,dcp=2,ep=2")


def _measured(rank: int, world_size: int) -> list[dict[str, object]]:
    setting = Setting(TINY, torch.device("cpu"), torch.float32, False, "fp32", 32)
    return measure(setting, [sizes_of(text) for text in SPLITS], [5, 67], timedelta(seconds=60))


def test_every_split_is_measured_and_agrees_with_one_rank() -> None:
    for rows in run_ranks(_measured, 2):
        assert [(row["split"], row["tokens"]) for row in rows] == [
            (split, tokens) for split in ("one GPU", "TP2", "PCP2 x EP2", "PCP2 x DCP2 x EP2") for tokens in (5, 67)
        ]
        assert all(row.get("agrees", True) for row in rows)
        # Without TP a CPU gives the bits of one rank.
        assert all(row["median_difference"] == 0.0 for row in rows if "PCP" in str(row["split"]))


def test_rows_that_are_wrong_do_not_agree() -> None:
    rows = torch.randn(1000, 16)
    near = Difference.between(rows * 1.001, rows)
    assert near.far == 0.0
    assert near.within(near, 1.0)
    swapped = rows.clone()
    swapped[:10] = rows[10:20]
    assert not Difference.between(swapped, rows).within(near, 2.0)
    assert not Difference.between(rows * 1.003, rows).within(near, 2.0)
    swapped[:] = float("nan")
    assert not Difference.between(swapped, rows).within(near, 2.0)


def test_splits_are_named() -> None:
    assert sizes_of("pcp=2,ep=2") == ParallelConfig(pcp=2, ep=2)
    assert name(ParallelConfig(tp=2)) == "TP2"
