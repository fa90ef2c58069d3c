"""What a row op refuses and what it makes right, for each argument of each op, on the reference and on the kernel.

A reference broadcasts, casts or raises errors of torch where a kernel reads beyond the end. So one valid call an op is
made wrong in one argument at a time, and both must answer with the same ValueError. The kernels run under Triton's
interpreter, in a process of their own.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cptools.formats import FP8_MLA, MlaRows
from cptools.kernels.kv_gather import unpack_rows
from cptools.kernels.kv_store import store_rows
from cptools.kernels.lse_merge import merge_weights
from cptools.kernels.norm_rope_store import IndexInput, MlaInput, norm_rope_store
from cptools.kernels.rowwise import RopeAngles, rms_norm
from cptools.kernels.sampling import Sampling, SamplingRows, probabilities, sample, token_logprobs, verify_drafts
from cptools.kernels.selected_slots import selected_slots
from cptools.paged_rows import PagedRows
from tests.kernels.row_op_calls import INDEX, LAYOUT, MLA, Call, calls

ROOT = Path(__file__).resolve().parents[2]
INDEX_DTYPES = (torch.int64, torch.int32)
SLOTS = torch.tensor([0, 3, -1])
KINDS = ("shapes", "dtypes", "devices")


def strided(x: Tensor) -> Tensor:
    """The same values, every second element of a memory that holds garbage in between."""
    return torch.stack([x, torch.full_like(x, 101)], -1)[..., 0]


def wrong_shapes(name: str, x: Tensor, free: tuple[str, ...]) -> Iterator[Tensor]:
    yield x.new_zeros(())
    yield x.unsqueeze(0)
    yield torch.stack([x, x], -1)
    if f"{name}.rows" not in free:
        yield x[:1]  # which torch would broadcast
        yield torch.cat([x, x])
    if x.dim() > 1 and f"{name}.columns" not in free:
        yield x[..., :1]
        yield torch.cat([x, x], -1)


def wrong(kind: str, name: str, x: Tensor, free: tuple[str, ...]) -> Iterator[Tensor]:
    if kind == "shapes":
        yield from wrong_shapes(name, x, free)
    elif kind == "devices":
        yield x.to("meta")
    elif x.dtype in INDEX_DTYPES:  # torch takes bool and uint8 for masks
        yield from (x.to(dtype) for dtype in (torch.float32, torch.uint8, torch.bool, torch.int16))
    else:
        yield from (x.to(dtype) for dtype in (torch.int64, torch.complex64))


def assert_refused(op: str, call: Call, kind: str, impl: str) -> None:
    for name, x in call.arguments.items():
        for other in wrong(kind, name, x, call.free):
            what = f"{op}({name}={other.dtype} {list(other.shape)} on {other.device}, impl={impl!r})"
            try:
                call.run(impl, **call.arguments | {name: other})
            except ValueError as error:
                message = str(error)
            except Exception as error:
                raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error
            else:
                raise AssertionError(f"{what} was accepted")
            assert re.search(r"got .*(\d|\[\]|meta)|\d rows|\(\d", message), f"{what}: no numbers in {message!r}"


def assert_strides_are_honoured(op: str, call: Call, impl: str) -> None:
    want = call.run(impl, **call.arguments)
    for name, x in call.arguments.items():
        for result, expected in zip(call.run(impl, **call.arguments | {name: strided(x)}), want, strict=True):
            torch.testing.assert_close(
                result,
                expected,
                rtol=1e-5,
                atol=1e-5,
                equal_nan=True,
                msg=lambda text, name=name: f"{op} {name}: {text}",
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", calls())
def test_what_does_not_fit_is_a_value_error_with_the_numbers(op, kind) -> None:
    assert_refused(op, calls()[op], kind, "reference")


@pytest.mark.parametrize("op", calls())
def test_strides_of_any_argument_are_honoured(op) -> None:
    assert_strides_are_honoured(op, calls()[op], "reference")


def check_kernels_refuse() -> None:
    serve_the_cpu()
    for op, call in calls().items():
        if call.has_kernel:
            for kind in KINDS:
                assert_refused(op, call, kind, "triton")


def check_kernels_honour_strides() -> None:
    serve_the_cpu()
    for op, call in calls().items():
        if call.has_kernel:
            assert_strides_are_honoured(op, call, "auto")


def check_kernels_agree_with_references() -> None:
    """The valid calls themselves."""
    serve_the_cpu()
    for op, call in calls().items():
        if call.has_kernel and not call.rounds:
            results = (call.run(impl, **call.arguments) for impl in ("triton", "reference"))
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, op=op: f"{op}: {text}")


def check_traces() -> None:
    """torch.compile in one graph: the choice reads no address, and what is not aligned is copied by the op."""
    serve_the_cpu()
    for op, call in calls().items():
        if not call.has_kernel:
            continue
        torch._dynamo.reset()
        run = torch.compile(
            lambda call=call, **arguments: call.run("triton", **arguments), backend="eager", fullgraph=True
        )
        for ours, theirs in zip(run(**call.arguments), call.run("triton", **call.arguments), strict=True):
            assert torch.equal(ours, theirs), op
    # Pages at an odd address: a trace does not see it.
    call = calls()["unpack_rows"]
    pages = call.arguments["pages"]
    odd = torch.cat([pages.flatten()[:1], pages.flatten()])[1:].view(pages.shape)
    assert odd.data_ptr() % 4
    arguments = {"row_format": FP8_MLA, "page_size": 4, "dtype": torch.float32}
    unpack = torch.compile(lambda x: unpack_rows(x, None, **arguments, impl="triton"), backend="eager", fullgraph=True)
    assert torch.equal(unpack(odd), unpack_rows(pages, None, **arguments, impl="reference"))
    c_kv, k_pe, slots = torch.full((2, 512), 256.0), torch.zeros(2, 64), torch.tensor([5, 0])
    kept, odd_kept = pages.clone(), odd.clone()
    odd_kept = torch.cat([odd_kept.flatten()[:1], odd_kept.flatten()])[1:].view(pages.shape)
    store = lambda x, impl: norm_rope_store(
        slots, None, mla=MlaInput(c_kv, k_pe, None, 0.0, x, FP8_MLA), page_size=4, impl=impl
    )
    torch.compile(lambda x: store(x, "triton"), backend="eager", fullgraph=True)(odd_kept)
    store(kept, "reference")
    assert torch.equal(odd_kept, kept)
    assert not torch.equal(kept, pages)


def check_values_of_no_width() -> None:
    """What has no values still has an lse, and rows without values are rows."""
    serve_the_cpu()
    from cptools.kernels.lse_merge import merge_states
    from cptools.kernels.rowwise import rope_interleaved

    lses = torch.randn(3, 2, 5)
    for outs in (torch.zeros(3, 2, 5, 0), list(torch.zeros(3, 2, 5, 0))):
        results = [merge_states(outs, lses, impl=impl)[1] for impl in ("triton", "reference")]
        torch.testing.assert_close(*results)
    for impl in ("triton", "reference"):
        assert rms_norm(torch.zeros(3, 0), torch.zeros(0), 1e-5, impl=impl).shape == (3, 0)
        none = RopeAngles(torch.zeros(3, 0), torch.zeros(3, 0))
        assert rope_interleaved(torch.zeros(3, 2, 0), none, impl=impl).shape == (3, 2, 0)


def check_a_wider_weight_does_not_widen_the_row() -> None:
    """A product with a weight of a wider dtype is rounded to the row's dtype before it goes on."""
    serve_the_cpu()
    generator = torch.Generator().manual_seed(0)
    c_kv = torch.randn(4, 128, generator=generator).half()
    weight = 1 + torch.rand(128, generator=generator) / 512
    rows = MlaRows(128, 16, torch.float32)
    stored = []
    for impl in ("triton", "reference"):
        pages = torch.zeros(1, 4 * rows.row_bytes, dtype=torch.uint8)
        mla = MlaInput(c_kv, torch.zeros(4, 16).half(), weight, 1e-5, pages, rows)
        norm_rope_store(torch.arange(4), None, mla=mla, page_size=4, impl=impl)
        stored.append(pages.view(torch.float32))
        assert torch.equal(stored[-1], stored[-1].half().float()), impl
    # The norm's sum may round once otherwise: one unit of half precision.
    torch.testing.assert_close(*stored, rtol=2e-3, atol=0)


def serve_the_cpu() -> None:
    """Let kernels be chosen for tensors on the CPU, which the interpreter serves."""
    from cptools.kernels import block_fp8, index_query, kv_gather, kv_store, lse_merge, norm_rope_store, rowwise
    from cptools.kernels import selected_slots as slots

    for module in (block_fp8, index_query, kv_gather, kv_store, lse_merge, norm_rope_store, rowwise, slots):
        module.triton_obstacle = lambda device: None
        __import__(f"{module.__name__}.triton")
    torch.Tensor.is_pinned = lambda self: True


@pytest.mark.parametrize(
    "check",
    [
        check_kernels_refuse,
        check_kernels_honour_strides,
        check_kernels_agree_with_references,
        check_traces,
        check_values_of_no_width,
        check_a_wider_weight_does_not_widen_the_row,
    ],
)
def test_under_the_interpreter(check: Callable[[], None]) -> None:
    pytest.importorskip("triton", reason="interpreting kernels needs triton")
    code = f"import runpy; runpy.run_path({__file__!r})[{check.__name__!r}]()"
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-4000:]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_norm_has_the_dtype_of_its_rows_on_any_device(device, dtypes) -> None:
    x, weight = (
        torch.ones(shape, dtype=dtype, device=device) for shape, dtype in zip([(3, 8), (8,)], dtypes, strict=True)
    )
    assert rms_norm(x, weight, 1e-5).dtype == x.dtype


@pytest.mark.parametrize(
    "wrong_lses",
    [
        [],
        [torch.zeros(2, 3), torch.zeros(1, 3)],
        [torch.zeros(2)],
        [torch.zeros(2, 3).double()],
        [torch.zeros(2, 3), torch.zeros(2, 3, device="meta")],
    ],
)
def test_weights_are_those_of_parts_alike(wrong_lses) -> None:
    with pytest.raises(ValueError, match=r"merge_weights: .*got"):
        merge_weights(wrong_lses)


@pytest.mark.parametrize("positions, dim", [(torch.zeros(3), 8), (torch.zeros(3, 1, dtype=torch.int64), 8), (SLOTS, 7)])
def test_angles_are_of_whole_positions_and_whole_pairs(positions, dim) -> None:
    with pytest.raises(ValueError, match=r"RopeAngles\.at: "):
        RopeAngles.at(positions, dim, 1e4)


@pytest.mark.parametrize("layer", [True, 1.0, -1, 2])
def test_a_layer_is_an_integer_in_range(layer) -> None:
    rows = PagedRows(MLA, num_layers=2, num_pages=1, page_size=4)
    with pytest.raises(ValueError, match="layer="):
        rows.gather(layer, SLOTS)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_pages_of_another_size_are_refused_before_a_byte_is_written(size) -> None:
    memory = torch.zeros(20, 48, dtype=torch.uint8)
    rows = torch.full((1, 24), 7, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=rf"store_rows: pages must be uint8 \[any, {24 * 2 * size}\], got uint8 \[3, 48\]"
    ):
        store_rows(memory[:3], torch.tensor([4]), rows, planes=(16, 8), page_size=2 * size)
    assert not memory.any()


@pytest.mark.parametrize("page_size", [0, -1, 2.0, True])
def test_a_page_size_is_a_count(page_size) -> None:
    pages, slots = torch.zeros(1, 656, dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(ValueError, match="page_size="):
        unpack_rows(pages, slots, row_format=FP8_MLA, page_size=page_size)


def test_a_slot_that_one_of_two_pools_lacks_leaves_both_as_they_were() -> None:
    mla_pages, index_pages = (
        torch.zeros(n, 4 * rows.row_bytes, dtype=torch.uint8) for n, rows in ((2, MLA), (1, INDEX))
    )
    mla = MlaInput(torch.ones(1, 128), torch.ones(1, 16), None, 0.0, mla_pages, MLA)
    index = IndexInput(torch.ones(1, 128), None, None, 0.0, index_pages, INDEX)
    with pytest.raises(ValueError, match=r"norm_rope_store: slots in \[5, 5\] do not fit 4 slots"):
        norm_rope_store(torch.tensor([5]), None, mla=mla, index=index, page_size=4)
    assert not mla_pages.any()
    assert not index_pages.any()


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_a_rank_outside_the_layout_holds_nothing_to_select(rank) -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"rank={rank} is outside world_size=2"):
        selected_slots(ids.view(1, 1), ids.view(1, 1), ids, ids.view(1, 1), layout=LAYOUT, rank=rank)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("setting", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_a_row_with_nan_or_inf_gives_what_greedy_gives_and_no_other_row_changes(broken, setting) -> None:
    rows = SamplingRows.of([Sampling(**{"temperature": 0.7, "seed": i} | setting) for i in range(5)])
    logits, positions = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    before = sample(logits, rows, positions)
    logits[2, 17] = broken
    tokens = sample(logits, rows, positions)
    assert tokens[2] == 17
    assert torch.equal(tokens[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert probabilities(logits, rows)[2, 17] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("outside", [-1, 9, 2**40])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_draft_outside_the_vocabulary_is_never_accepted(temperature, outside, drawn) -> None:
    rows = SamplingRows.of([Sampling(temperature, seed=i) for i in range(64)])
    logits = torch.randn(64, 3, 9, generator=torch.Generator().manual_seed(0))
    drafts = logits[:, :2].argmax(2)
    drafts[:, 1] = outside
    arguments = {"counts": torch.full((64,), 2), "draft_probs": logits[:, :2].softmax(2) if drawn else None}
    verified = verify_drafts(logits, drafts, rows, torch.arange(64), **arguments)
    assert verified.accepted.max() == 1
    own = verified.tokens.gather(1, verified.accepted.unsqueeze(1))
    assert ((own >= 0) & (own < 9)).all()
    assert (verified.tokens[:, 2] == -1).all()


def test_a_token_outside_the_vocabulary_has_no_logprob() -> None:
    logits = torch.randn(3, 9)
    chosen = token_logprobs(logits, torch.tensor([4, -1, 9]), 0).chosen
    assert chosen.isnan().tolist() == [False, True, True]


def test_settings_that_do_not_fit_together_are_refused() -> None:
    rows = SamplingRows.of([Sampling(), Sampling()])
    columns = {name: getattr(rows, name) for name in ("temperature", "top_k", "top_p", "seed", "request")}
    for wrong_column in ({"seed": rows.seed[:1]}, {"top_k": rows.top_k.float()}, {"request": rows.request.to("meta")}):
        with pytest.raises(ValueError, match="SamplingRows: "):
            SamplingRows(**columns | wrong_column, greedy=True, truncated=False)
