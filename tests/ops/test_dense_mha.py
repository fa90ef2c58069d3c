"""Causal attention in tiles against fp64, and against attention over selected rows when everything is selected."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cptools.kernels.dense_mha import dense_mha
from cptools.kernels.dense_mha.reference import KEY_TILE, QUERY_TILE
from cptools.kernels.sparse_mla import sparse_mla

INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(
    query: Tensor, keys: Tensor, values: Tensor, kv_lens: Tensor, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """fp64, one query at a time over exactly the keys it sees."""
    q, k, v = query.double().numpy(), keys.double().numpy(), values.double().numpy()
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -INF)
    for t, length in enumerate(kv_lens.tolist()):
        if length:
            scores = np.einsum("hd,shd->hs", q[t], k[:length]) * scale
            top = scores.max(1)
            lse[t] = top + np.log(np.exp(scores - top[:, None]).sum(1))
            out[t] = np.einsum("hs,shv->hv", np.exp(scores - lse[t][:, None]), v[:length])
    return out, lse


def assert_attends(
    query: Tensor, keys: Tensor, values: Tensor, kv_lens: Tensor, *, scale: float, atol: float = 2e-5
) -> None:
    out, lse = dense_mha(query, keys, values, kv_lens, scale=scale)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == (*query.shape[:2], values.shape[2])
    expected_out, expected_lse = attention(query, keys, values, kv_lens, scale)
    np.testing.assert_allclose(out.double().numpy(), expected_out, rtol=0, atol=atol)
    np.testing.assert_allclose(lse.double().numpy(), expected_lse, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("length", [1, 2, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE + 1])
@pytest.mark.parametrize("heads, dim, v_dim", [(1, 8, 8), (3, 24, 16), (2, 33, 5)])
def test_causal_prompt_in_fp64(length, heads, dim, v_dim) -> None:
    assert KEY_TILE == 256
    query, keys = normal(length, heads, dim, seed=0), normal(length, heads, dim, seed=1)
    assert_attends(query, keys, normal(length, heads, v_dim, seed=2), torch.arange(1, length + 1), scale=dim**-0.5)


@pytest.mark.parametrize("tokens", [1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1])
def test_any_limits_per_row(tokens) -> None:
    """Rows need not be in order: none, one, all keys and the edges of the key tiles, side by side in a tile."""
    lens = torch.tensor([0, 1, 255, 256, 257, 300, 0, 511, 512, 513, 600] * 6)[:tokens]
    query, keys, values = normal(tokens, 2, 24, seed=3), normal(600, 2, 24, seed=4), normal(600, 2, 16, seed=5)
    assert_attends(query, keys, values, lens, scale=0.2)


def test_rows_that_see_nothing_are_empty() -> None:
    """out 0, lse -inf, in a tile of their own and beside others (field case B2)."""
    query, keys, values = normal(130, 2, 8, seed=6), normal(300, 2, 8, seed=7), normal(300, 2, 8, seed=8)
    lens = torch.zeros(130, dtype=torch.int64)
    lens[3] = 300
    out, lse = dense_mha(query, keys, values, lens, scale=0.3)
    none = torch.arange(130) != 3
    assert not out[none].any()
    assert (lse[none] == -INF).all()
    assert lse[3].isfinite().all()
    assert_attends(query, keys, values, lens, scale=0.3)


def test_a_running_softmax_survives_any_order_of_scores() -> None:
    """The maximum of a later tile is far above, or far below, that of an earlier one."""
    keys, values = torch.zeros(700, 1, 2), normal(700, 1, 3, seed=9)
    keys[:, 0, 0] = torch.linspace(-1e4, 1e4, 700)
    query = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]], [[0.0, 1.0]], [[0.01, 0.0]]])
    assert_attends(query, keys, values, torch.tensor([700] * 4), scale=1.0, atol=1e-4)


@pytest.mark.parametrize("length", [1, 100, KEY_TILE + 1])
def test_equals_sparse_attention_that_selects_everything(length) -> None:
    """The dense path is taken where top-k would select every key: then both are one attention."""
    query, rows = normal(length, 3, 40, seed=10), normal(length, 40, seed=11)
    ids = torch.arange(length).expand(length, -1)
    ids = ids.masked_fill(ids > torch.arange(length).unsqueeze(1), -1)
    expected = sparse_mla(query, rows, ids, scale=0.16, v_dim=32)
    keys, values = rows.unsqueeze(1).expand(-1, 3, -1), rows[:, :32].unsqueeze(1).expand(-1, 3, -1)
    actual = dense_mha(query, keys, values, torch.arange(1, length + 1), scale=0.16)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_heads_do_not_mix() -> None:
    query, keys, values = normal(70, 3, 8, seed=12), normal(70, 3, 8, seed=13), normal(70, 3, 8, seed=14)
    lens = torch.arange(1, 71)
    out, lse = dense_mha(query, keys, values, lens, scale=0.3)
    keys[:, 1], values[:, 1] = NAN, NAN
    poisoned, poisoned_lse = dense_mha(query, keys, values, lens, scale=0.3)
    assert poisoned[:, 1].isnan().all()
    torch.testing.assert_close(poisoned[:, ::2], out[:, ::2], rtol=0, atol=1e-6)
    torch.testing.assert_close(poisoned_lse[:, ::2], lse[:, ::2], rtol=0, atol=1e-6)


def test_bf16_inputs_give_float32() -> None:
    query, keys, values = (normal(30, 2, 8, seed=seed).bfloat16() for seed in (15, 16, 17))
    assert_attends(query, keys, values, torch.arange(1, 31), scale=0.3)


def test_no_query_no_key() -> None:
    none = torch.empty(0, dtype=torch.int64)
    out, lse = dense_mha(torch.empty(0, 2, 8), normal(5, 2, 8, seed=18), normal(5, 2, 4, seed=19), none, scale=1.0)
    assert out.shape == (0, 2, 4)
    assert lse.shape == (0, 2)
    lens = torch.zeros(3, dtype=torch.int64)
    out, lse = dense_mha(normal(3, 2, 8, seed=20), torch.empty(0, 2, 8), torch.empty(0, 2, 4), lens, scale=1.0)
    assert not out.any()
    assert (lse == -INF).all()


def test_wrong_shapes_raise_with_the_numbers() -> None:
    query, keys, values, lens = (
        torch.zeros(3, 2, 8),
        torch.zeros(5, 2, 8),
        torch.zeros(5, 2, 4),
        torch.tensor([1, 2, 5]),
    )
    with pytest.raises(ValueError, match=r"keys must be .* \[any, 2, 8\], got float32 \[5, 2, 7\]"):
        dense_mha(query, keys[..., :7], values, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"keys must be .*got float32 \[5, 1, 8\]"):
        dense_mha(query, keys[:, :1], values[:, :1], lens, scale=1.0)
    with pytest.raises(ValueError, match=r"values must be .*got float32 \[4, 2, 4\]"):
        dense_mha(query, keys, values[:4], lens, scale=1.0)
    with pytest.raises(ValueError, match=r"kv_lens must be .* \[3\], got int64 \[2\]"):
        dense_mha(query, keys, values, lens[:2], scale=1.0)
    with pytest.raises(ValueError, match="kv_lens reach 6, there are 5 keys"):
        dense_mha(query, keys, values, torch.tensor([1, 6, 5]), scale=1.0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_later_value_never_reaches_an_earlier_row(poison: float) -> None:
    """0 * NaN is NaN, so a weight of 0 does not hide what a row may not see; a row that sees it shows it."""
    query, keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    want, _ = dense_mha(query, keys, values, torch.tensor([1, 2, 3]), scale=0.5)
    values[2] = poison
    got, _ = dense_mha(query, keys, values, torch.tensor([1, 2, 3]), scale=0.5)
    assert torch.equal(got[:2], want[:2])
    assert not torch.isfinite(got[2]).any()
