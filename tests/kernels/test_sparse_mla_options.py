"""What the op adds around its implementations: counts, packed rows, output dtype, the choice and its reason."""

from __future__ import annotations

import pytest
import torch

from cptools.formats import FP8, MlaRows
from cptools.kernels.sparse_mla import choose_sparse_mla, reference, sparse_mla


def inputs(tokens: int = 5, columns: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(tokens, 3, 24), torch.randn(40, 24), torch.randint(0, 40, (tokens, columns))


def test_counts_ignore_the_columns_behind_them() -> None:
    query, rows, ids = inputs()
    counts = torch.tensor([0, 1, 6, 12, 99])
    out, lse = sparse_mla(query, rows, ids, scale=0.3, v_dim=16, counts=counts)
    for token, count in enumerate(counts.tolist()):
        cut = ids[token : token + 1, :count]
        want = reference.sparse_mla(query[token : token + 1], rows, cut, scale=0.3, v_dim=16)
        torch.testing.assert_close(out[token : token + 1], want[0])
        torch.testing.assert_close(lse[token : token + 1], want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_packed_rows_are_unpacked_first(dtype: torch.dtype) -> None:
    query, rows, ids = inputs()
    row_format = MlaRows(16, 8, dtype)
    packed = row_format.pack(rows[:, :16], rows[:, 16:])
    got = sparse_mla(query, packed, ids, scale=0.3, v_dim=16, row_format=row_format)
    want = sparse_mla(query, row_format.unpack_joint(packed), ids, scale=0.3, v_dim=16)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_output_dtype_is_a_rounding_of_float32() -> None:
    query, rows, ids = inputs()
    wide, _ = sparse_mla(query, rows, ids, scale=0.3, v_dim=16)
    narrow, lse = sparse_mla(query, rows, ids, scale=0.3, v_dim=16, out_dtype=torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())
    assert lse.dtype == torch.float32


def test_the_cpu_takes_the_reference_and_says_why() -> None:
    query, rows, ids = inputs()
    choice = choose_sparse_mla(query, rows, ids, scale=0.3, v_dim=16)
    assert choice.impl == "reference"
    assert choice.fallback_reason == "gluon: tensors are on cpu; triton: tensors are on cpu"
    for impl in ("gluon", "triton"):
        with pytest.raises(ValueError, match="tensors are on cpu"):
            sparse_mla(query, rows, ids, scale=0.3, v_dim=16, impl=impl)


def test_refusals_hold_the_numbers() -> None:
    query, rows, ids = inputs()
    with pytest.raises(ValueError, match=r"counts must be int64 or int32 \[5\], got float32 \[4\]"):
        sparse_mla(query, rows, ids, scale=0.3, v_dim=16, counts=torch.zeros(4))
    with pytest.raises(ValueError, match=r"out_dtype=torch\.float64"):
        sparse_mla(query, rows, ids, scale=0.3, v_dim=16, out_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"uint8 \[any, 192\], got float32 \[40, 24\]"):
        sparse_mla(query, rows, ids, scale=0.3, v_dim=16, row_format=MlaRows(32, 16, torch.float32))
