"""The choice of an implementation is explicit, reported, and refused with the reason."""

import pytest
import torch

from cptools.kernels.impl import Choice, choose, triton_obstacle


def test_auto_takes_the_first_that_serves() -> None:
    assert choose("op", "auto", {"gluon": "too few heads", "triton": None}) == Choice("triton")


def test_auto_falls_back_to_the_reference_and_says_why() -> None:
    choice = choose("op", "auto", {"gluon": "too few heads", "triton": "tensors are on cpu"})
    assert choice == Choice("reference", "gluon: too few heads; triton: tensors are on cpu")


def test_a_named_implementation_is_taken_or_refused_with_the_reason() -> None:
    assert choose("op", "reference", {"triton": None}) == Choice("reference")
    assert choose("op", "triton", {"triton": None}) == Choice("triton")
    with pytest.raises(ValueError, match="op: impl='triton' does not serve these inputs: tensors are on cpu"):
        choose("op", "triton", {"triton": "tensors are on cpu"})
    with pytest.raises(ValueError, match="op: impl='cuda' is not one of auto, reference, triton"):
        choose("op", "cuda", {"triton": None})


def test_obstacle_on_the_cpu() -> None:
    assert triton_obstacle(torch.device("cpu")) == "tensors are on cpu"
