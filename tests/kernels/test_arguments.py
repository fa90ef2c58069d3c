"""The checks that ops share: what they refuse, that strides are made right, and that a trace has no addresses."""

import pytest
import torch

from cptools.kernels.arguments import (
    ANY,
    FLOATS,
    aligned,
    check_count,
    check_integers,
    check_one_device,
    check_tensor,
    dense,
    dense_rows,
    is_aligned,
)


def test_a_wrong_dtype_or_shape_is_refused_with_the_numbers() -> None:
    check_tensor("op", "x", torch.zeros(2, 3), FLOATS, (2, 3))
    check_tensor("op", "x", torch.zeros(2, 3), FLOATS, (ANY, 3))
    check_integers("op", "slots", torch.zeros(4, dtype=torch.int32), (4,))
    with pytest.raises(ValueError, match=r"op: slots must be int64 or int32 \[4\], got uint8 \[4\]"):
        check_integers("op", "slots", torch.zeros(4, dtype=torch.uint8), (4,))
    with pytest.raises(ValueError, match=r"op: slots must be int64 or int32 \[any\], got int64 \[\]"):
        check_integers("op", "slots", torch.tensor(4), (ANY,))
    with pytest.raises(ValueError, match=r"op: x must be float32 \[any, 4\], got float32 \[2, 3\]"):
        check_tensor("op", "x", torch.zeros(2, 3), (torch.float32,), (ANY, 4))


def test_two_devices_are_refused_with_their_names() -> None:
    check_one_device("op", a=torch.zeros(1), b=None, c=torch.zeros(1))
    with pytest.raises(ValueError, match="op: tensors must be on one device, got a on cpu, c on meta"):
        check_one_device("op", a=torch.zeros(1), b=None, c=torch.zeros(1, device="meta"))


@pytest.mark.parametrize("value", [0, 2.5, True, "3"])
def test_a_count_is_an_integer_of_at_least_the_minimum(value) -> None:
    check_count("op", "page_size", 1, minimum=1)
    with pytest.raises(ValueError, match="op: page_size="):
        check_count("op", "page_size", value, minimum=1)


def test_strides_are_made_right_and_what_is_right_is_not_copied() -> None:
    x = torch.arange(12).view(4, 3)
    for strided in (x[:, 0], x[0, :1].expand(5), x.t()):
        assert dense(strided).is_contiguous()
        assert torch.equal(dense(strided), strided)
    assert dense(x) is x
    rows = x[:, :2]
    assert dense_rows(rows) is rows
    assert dense_rows(x.t()).stride() == (4, 1)


def test_a_trace_has_no_addresses() -> None:
    x = torch.zeros(9, dtype=torch.uint8)
    assert is_aligned(x, 16)
    assert not is_aligned(x[1:], 16)
    assert aligned(x, 16) is x
    assert aligned(x[1:], 16).data_ptr() % 16 == 0
    choice = torch.compile(lambda x: x + int(is_aligned(x, 16)), backend="eager", fullgraph=True)
    assert torch.equal(choice(x[1:]), x[1:] + 1)


def test_a_size_that_is_a_symbol_in_a_trace_is_compared() -> None:
    x = torch.randn(3, 4)

    def checked(x):
        check_tensor("op", "x", x, FLOATS, (3, 4))
        check_tensor("op", "x", x, FLOATS, (ANY, 4))
        check_tensor("op", "x", x, FLOATS, (3, ANY))
        return x + 1

    compiled = torch.compile(checked, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), x + 1)


def test_the_checks_can_be_traced() -> None:
    def checked(x, slots):
        check_tensor("op", "x", x, FLOATS, (slots.shape[0], ANY))
        check_integers("op", "slots", slots, (x.shape[0],))
        check_one_device("op", x=x, slots=slots)
        check_count("op", "page_size", x.shape[0], minimum=1)
        return dense_rows(x)[dense(slots)]

    compiled = torch.compile(checked, backend="eager", fullgraph=True, dynamic=True)
    x, slots = torch.randn(3, 4), torch.tensor([2, 0, 1])
    assert torch.equal(compiled(x, slots), x[slots])
