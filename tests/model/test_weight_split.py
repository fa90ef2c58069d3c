"""Sizes of a model that a split has to divide. What a rank keeps: test_weight_loading.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.glm53.weight_split import WeightSplit, check_split
from tests.checkpoints import TINY


@pytest.mark.parametrize(
    ("changes", "split", "reason"),
    [
        ({}, {"tp": 3}, "tp=3 must divide num_attention_heads=8"),
        ({}, {"ep": 3}, "ep=3 must divide n_routed_experts=16"),
        ({"moe_intermediate_size": 60}, {"tp": 8}, "tp=8 must divide moe_intermediate_size=60"),
        ({"intermediate_size": 250}, {"tp": 4}, "tp=4 must divide intermediate_size=250"),
        ({"moe_intermediate_size": 61, "n_shared_experts": 1}, {"tp": 2, "ep": 2}, "n_shared_experts=61"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes: dict[str, int], split: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_split(replace(TINY, **changes), WeightSplit(**split))


def test_experts_spread_over_ranks_need_no_divisible_width() -> None:
    check_split(replace(TINY, moe_intermediate_size=60, n_shared_experts=2), WeightSplit(tp=8, ep=16))
