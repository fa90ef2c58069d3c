"""Selection and attention ops given what is wrong or unusual: the same answer, or the same refusal, by every path.

Everything here runs on the reference, and once more in a process where Triton's interpreter runs the plain kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8, FP8_MLA, IndexRows, MlaRows
from cptools.kernels import impl as implementations
from cptools.kernels import indexer_topk as indexer
from cptools.kernels import paged_topk as paged
from cptools.kernels import shard_candidates, sparse_mla
from cptools.kernels.sparse_mla import decode
from cptools.kernels.topk_select import INVALID, encode_order

from .attention_calls import Call, calls

IN_KERNELS = os.environ.get("TRITON_INTERPRET") == "1"
CALLS = calls()
ARGUMENTS = [(op, name) for op, call in CALLS.items() for name in call.arguments]
BYTES = ("pages", "pool")  # of which a row is words of several kinds, so that nothing strided is served
Floats = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under the interpreter plain Triton serves the CPU, and Gluon nothing."""
    if not IN_KERNELS:
        yield
        return
    import triton.runtime.interpreter as interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope):
        # numpy 2.4 no longer takes an array of one element for an integer, which a loop bound is to the interpreter.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index_too)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    served = types.SimpleNamespace(**vars(implementations) | {"triton_obstacle": lambda device: None})
    monkeypatch.setattr(indexer, "implementations", served)
    for module in (sparse_mla, decode, paged, shard_candidates):
        monkeypatch.setattr(module, "triton_obstacle", served.triton_obstacle)
    yield


def run(call: Call, **changed: object) -> tuple[Tensor, ...]:
    made = call.run(**call.arguments | call.sizes | changed)
    return made if isinstance(made, tuple) else (made,)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def shifted(x: Tensor) -> Tensor:
    """The same bytes one further, at an odd address."""
    space = torch.full((x.numel() + 1,), 0xFF, dtype=torch.uint8)
    space[1:] = x.flatten()
    return space[1:].view(x.shape)


@pytest.mark.parametrize("op", [op for op, call in CALLS.items() if call.choose])
def test_kernels_run_where_there_are_some(op: str) -> None:
    call = CALLS[op]
    assert call.choose is not None
    assert call.choose(**call.arguments | call.sizes) == ("triton" if IN_KERNELS else "reference")


@pytest.mark.parametrize(("op", "name"), [x for x in ARGUMENTS if x[1] not in BYTES])
def test_strides_do_not_change_the_result(op: str, name: str) -> None:
    call = CALLS[op]
    x = call.arguments[name]
    between = torch.full_like(x, 3) if x.dtype == torch.int64 else torch.full_like(x.float(), torch.nan).to(x.dtype)
    columns = torch.stack([x, between], -1)[..., 0]
    assert x.numel() == 1 or not columns.is_contiguous()
    want = run(call)
    assert_same(run(call, **{name: columns}), want)
    transposed = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert_same(run(call, **{name: transposed}), want)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, call in CALLS.items() for name in call.by_row])
def test_a_companion_is_not_broadcast(op: str, name: str) -> None:
    call = CALLS[op]
    x = call.arguments[name]
    for wrong in (x[:1], x[:-1], torch.cat([x, x[:1]])):
        with pytest.raises(ValueError, match=r"\d"):
            run(call, **{name: wrong})


@pytest.mark.parametrize(("op", "name"), [x for x in ARGUMENTS if not x[0].endswith("_order")])
def test_another_number_of_dims_is_refused(op: str, name: str) -> None:
    call = CALLS[op]
    x = call.arguments[name]
    for wrong in (x.flatten()[0], x.unsqueeze(0), x.unsqueeze(-1)):
        with pytest.raises(ValueError, match=r"\d|\[\]|\(\)"):
            run(call, **{name: wrong})


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_another_dtype_is_refused(op: str, name: str) -> None:
    call = CALLS[op]
    x = call.arguments[name]
    wrong = [torch.bool, torch.complex64, torch.int16]
    if x.dtype != torch.uint8:
        wrong.append(torch.uint8)  # torch takes it for a mask
    wrong += [torch.float32, torch.float64] if not x.is_floating_point() else [torch.int64, torch.int32]
    for dtype in wrong:
        given = torch.zeros(x.shape, dtype=dtype)
        with pytest.raises(ValueError, match=str(dtype).removeprefix("torch.")):
            run(call, **{name: given})


@pytest.mark.parametrize(("op", "name"), [x for x in ARGUMENTS if len(CALLS[x[0]].arguments) > 1])
def test_another_device_is_refused(op: str, name: str) -> None:
    call = CALLS[op]
    with pytest.raises(ValueError, match="on meta"):
        run(call, **{name: call.arguments[name].to("meta")})


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, call in CALLS.items() for name in call.sizes])
def test_a_size_is_an_integer_in_range(op: str, name: str) -> None:
    call = CALLS[op]
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"{name}={wrong}"):
            run(call, **{name: wrong})
    if name not in ("columns", "rank"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            run(call, **{name: 0})


def test_a_rank_is_one_of_the_world() -> None:
    with pytest.raises(ValueError, match="rank=2 of world_size=2"):
        run(CALLS["encode_candidates"], rank=2)


@pytest.mark.parametrize("op", ["indexer_scores", "indexer_topk"])
@pytest.mark.parametrize("halves", [("query",), ("keys",), ("weights",), ("query", "weights", "keys")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_halves_are_float32(op: str, halves: tuple[str, ...], dtype: torch.dtype) -> None:
    call = CALLS[op]
    if IN_KERNELS and dtype == torch.bfloat16 and len(halves) == 3:
        pytest.skip("the interpreter multiplies bfloat16 operands wrongly")
    rounded = {name: call.arguments[name].to(dtype) for name in halves}
    got = run(call, **rounded)
    want = run(call, **{name: x.float() for name, x in rounded.items()})
    if not IN_KERNELS:
        assert_same(got, want)
    assert got[-1].dtype == torch.float32
    torch.testing.assert_close(got[-1], want[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
def test_a_page_that_does_not_exist_holds_keys_of_zeros(dtype: torch.dtype) -> None:
    row_format = IndexRows(4, dtype)
    keys = torch.tensor([5.0, 1.0, 2.0, 3.0]).unsqueeze(1).expand(4, 4) / 4
    planes = [row_format.pack(keys)[:, start:stop].reshape(2, -1) for start, stop in ((0, 4), (4, None))]
    pages = torch.cat(planes, 1) if dtype == FP8 else row_format.pack(keys).view(2, -1)
    query, weights = torch.full((1, 1, 4), 2.0), torch.full((1, 1), 4.0)
    sizes = {"kv_lens": torch.tensor([4]), "k": 5, "row_format": row_format, "page_size": 2}
    for missing in (-1, 2, 2147480000, -(2**40)):
        tables = torch.tensor([[1, missing]])
        positions, scores = paged.paged_topk(query, weights, pages, tables, **sizes)
        assert positions.tolist() == [[0, 1, 2, 3, -1]]
        assert scores[0, :4].tolist() == [16.0, 24.0, 0.0, 0.0]
        if dtype == FP8:
            fp8 = indexer.IndexKeys.from_pages(pages, tables, page_size=2)
            got = indexer.indexer_scores_fp8(query.to(FP8), weights, fp8, kv_lens=sizes["kv_lens"])
            assert got.tolist() == [[16.0, 24.0, 0.0, 0.0]]
    positions, scores = paged.paged_topk(query, weights, pages[:0], torch.tensor([[0, 1]]), **sizes)
    assert positions.tolist() == [[0, 1, 2, 3, -1]]
    assert scores[0, :4].tolist() == [0.0] * 4


def test_behind_a_table_nothing_is_another_requests() -> None:
    call = CALLS["indexer_scores_fp8, paged"]
    lens = torch.tensor([12, 14, 99, 3])
    (scores,) = run(call, kv_lens=lens, columns=16)
    (want,) = run(call, kv_lens=lens, columns=12)
    assert torch.equal(scores[:, :12], want)
    assert (scores[:, 12:] == -torch.inf).all()


@pytest.mark.parametrize("op", ["indexer_topk", "indexer_topk_fp8", "indexer_scores_fp8"])
@pytest.mark.parametrize("start", [-1, 21, 2**40])
def test_a_padded_row_may_start_anywhere(op: str, start: int) -> None:
    call = CALLS[op]
    lens = torch.tensor([3, 0, 0, 12])
    want = run(call, kv_lens=lens)
    got = run(call, kv_lens=lens, key_starts=torch.tensor([0, start, start, 8]))
    assert_same(got, want)
    if op != "indexer_topk":  # whose reference refuses it
        assert_same(run(call, kv_lens=torch.tensor([3, 2, 4, 12]), key_starts=torch.tensor([0, start, start, 8])), want)


@pytest.mark.parametrize("op", [op for op, call in CALLS.items() if "tables" in call.arguments])
def test_no_request_gives_no_row(op: str) -> None:
    call = CALLS[op]
    empty = {name: call.arguments[name][:0] for name in ("query", "weights", "tables", "kv_lens")}
    assert all(x.shape[0] == 0 for x in run(call, **empty))


@pytest.mark.parametrize("op", ["paged_topk", "paged_topk, floats", "sparse_mla_decode"])
def test_bytes_at_an_odd_address_are_read(op: str) -> None:
    call = CALLS[op]
    name = next(name for name in BYTES if name in call.arguments)
    odd = shifted(call.arguments[name])
    assert odd.data_ptr() % 2
    assert call.choose is not None
    assert call.choose(**call.arguments | call.sizes | {name: odd}) == "reference"
    assert_same(run(call, **{name: odd}), run(call, impl="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_packed_rows_at_an_odd_address_are_read(dtype: torch.dtype) -> None:
    row_format = MlaRows(128, 16, dtype)
    generator = torch.Generator().manual_seed(1)
    packed = row_format.pack(*(torch.randn(9, n, generator=generator) for n in (128, 16)))
    query, ids = torch.randn(2, 3, 144, generator=generator), torch.tensor([[0, 8, 4], [1, 9, -1]])
    sizes = {"scale": 0.1, "v_dim": 128}
    got = sparse_mla.sparse_mla(query, shifted(packed), ids, row_format=row_format, **sizes)
    want = sparse_mla.sparse_mla(query, row_format.unpack_joint(packed), ids, **sizes)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_pages_whose_scales_are_no_words_fall_back() -> None:
    row_format = IndexRows(33, FP8)
    pages = torch.zeros(2, 3 * row_format.row_bytes, dtype=torch.uint8)
    tables, query, weights = torch.tensor([[0, 1]]), torch.ones(1, 2, 33), torch.ones(1, 2)
    sizes = {"row_format": row_format, "page_size": 3}
    choice = paged.choose_paged_topk(query, pages, tables, **sizes)
    assert choice.impl == "reference"
    assert "scales behind byte 99" in str(choice.fallback_reason) or not IN_KERNELS
    positions, _ = paged.paged_topk(query, weights, pages, tables, kv_lens=torch.tensor([4]), k=6, **sizes)
    assert positions.tolist() == [[0, 1, 2, 3, -1, -1]]
    with pytest.raises(ValueError, match="scales behind byte 99"):
        indexer.IndexKeys.from_pages(pages, tables, page_size=3)


def test_keys_of_one_row_or_of_no_key_at_all() -> None:
    row = IndexRows(33, FP8).pack(torch.arange(33.0).unsqueeze(0))
    keys = indexer.IndexKeys.from_rows(row)
    assert (keys.dim, keys.capacity) == (33, 1)
    for wrong in (row[:, :3], row[0], row.float(), row[0, 0]):
        with pytest.raises(ValueError, match="IndexKeys: want rows uint8"):
            indexer.IndexKeys.from_rows(wrong)
    for page_size in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"page_size={page_size}"):
            indexer.IndexKeys.from_pages(row, torch.zeros(1, 1, dtype=torch.int64), page_size=page_size)
    with pytest.raises(ValueError, match=r"\(1, 64\) and \(1, 0\)"):
        indexer.IndexKeys(torch.zeros(1, 64).to(FP8), torch.zeros(1, 0), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("op", ["sparse_mla", "sparse_mla_decode"])
def test_counts_beyond_32_bits_do_not_wrap(op: str) -> None:
    call = CALLS[op]
    rows = call.arguments["query"].shape[0]
    for count, like in ((2**32 + 3, 20), (-(2**32) + 3, 0), (2**63 - 1, 20), (-(2**63), 0)):
        got = run(call, counts=torch.tensor([count] * rows))
        assert_same(got, run(call, counts=torch.tensor([like] * rows)))


def test_the_last_position_is_a_position() -> None:
    last = 2**32 - 1
    keys = encode_order(torch.zeros(1, 3), torch.tensor([[last, 7, last - 1]]))
    keys = torch.cat([keys, torch.full((1, 2), INVALID)], 1)
    assert shard_candidates.chosen_positions(keys).tolist() == [[7, last - 1, last, -1, -1]]


CHOICES = {
    "sparse_mla": lambda x: sparse_mla.choose_sparse_mla(
        x.new_zeros(2, 64, 576), x.new_zeros(9, 576), x.new_zeros(2, 4).long(), scale=0.1, v_dim=512
    ),
    "sparse_mla, packed": lambda x: sparse_mla.choose_sparse_mla(
        x.new_zeros(2, 64, 576),
        x.new_zeros(9, BF16_MLA.row_bytes).byte(),
        x.new_zeros(2, 4).long(),
        scale=0.1,
        v_dim=512,
        row_format=BF16_MLA,
    ),
    "sparse_mla_decode": lambda x: sparse_mla.choose_sparse_mla_decode(
        x.new_zeros(2, 64, 576), x.new_zeros(9, 656).byte(), x.new_zeros(2, 4).long(), row_format=FP8_MLA
    ),
    "indexer": lambda x: indexer.choose_indexer_scores(
        x.new_zeros(2, 32, 128), indexer.IndexKeys.from_rows(x.new_zeros(9, 132).byte())
    ),
    "paged_topk": lambda x: paged.choose_paged_topk(
        x.new_zeros(2, 32, 128),
        x.new_zeros(9, 64 * 132).byte(),
        x.new_zeros(2, 4).long(),
        row_format=IndexRows(128, FP8),
        page_size=64,
    ),
    "paged_topk, floats": lambda x: paged.choose_paged_topk(
        x.new_zeros(2, 32, 128),
        x.new_zeros(9, 64 * 256).byte(),
        x.new_zeros(2, 4).long(),
        row_format=IndexRows(128, torch.bfloat16),
        page_size=64,
    ),
    "shard_candidates": lambda x: shard_candidates.choose_shard_candidates(x),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_can_be_traced(name: str) -> None:
    number = lambda x: x + ("reference", "triton", "gluon").index(CHOICES[name](x).impl)
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(number, backend="eager", fullgraph=True, dynamic=True)(x), number(x))


@pytest.mark.skipif(not IN_KERNELS, reason="references read values to find their way")
@pytest.mark.parametrize("op", [op for op, call in CALLS.items() if call.choose])
def test_an_op_that_runs_kernels_can_be_traced(op: str) -> None:
    call = CALLS[op]
    names = list(call.arguments)
    whole = lambda *given: call.run(**dict(zip(names, given, strict=True)), **call.sizes)
    torch._dynamo.reset()
    made = torch.compile(whole, backend="eager", fullgraph=True, dynamic=True)(*call.arguments.values())
    assert_same(made if isinstance(made, tuple) else (made,), run(call))


@pytest.mark.skipif(IN_KERNELS, reason="this is the process that it starts")
def test_the_same_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
