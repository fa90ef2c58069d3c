"""Every kernel once on small shapes, for compute-sanitizer.

    python -m tests.gpu.sanitize [--only merge,topk]             run the cases
    python -m tests.gpu.sanitize --tools memcheck,racecheck --out FILE.json   run them under the tools, and summarise

Results are not looked at here: the suite does that. Shapes fill no tile, ids point nowhere, and under the tools each
tensor is an allocation of its own, so that one byte too far is seen.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cptools.formats import BF16_MLA, FP8, FP8_INDEX, FP8_MLA
from cptools.kernels.block_fp8 import BlockFP8
from cptools.kernels.expert_routing import combine, group_by_expert, route
from cptools.kernels.grouped_swiglu import grouped_swiglu
from cptools.kernels.indexer_topk import IndexKeys, indexer_scores, indexer_scores_fp8, indexer_topk, indexer_topk_fp8
from cptools.kernels.kv_gather import copy_rows, gather_rows, gather_sequences, unpack_rows
from cptools.kernels.kv_store import store_rows
from cptools.kernels.lse_merge import merge_states
from cptools.kernels.norm_rope_store import IndexInput, MlaInput, norm_rope_store
from cptools.kernels.rowwise import RopeAngles
from cptools.kernels.selected_slots import selected_slots
from cptools.kernels.sparse_mla import sparse_mla, sparse_mla_decode
from cptools.kernels.topk_select import merge_orders, topk_select
from cptools.layout import KVLayout

SCALE = 256**-0.5


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Made on the CPU: no kernel but those under test need run under the tool."""
    return torch.randn(*shape).to(dtype).cuda()


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).cuda()


def holed(ids: Tensor, rows: int) -> Tensor:
    """Ids of which some name no row."""
    flat = ids.view(-1)
    flat[3::7], flat[5::11], flat[6::13] = -1, rows, 2147480000
    return ids.cuda()


def merge() -> None:
    for parts, tokens, heads, dim in ((2, 1, 3, 512), (2, 40, 63, 512), (3, 5, 3, 40), (20, 3, 2, 96)):
        outs, lses = randn(parts, tokens, heads, dim, dtype=torch.bfloat16), randn(parts, tokens, heads)
        merge_states(list(outs), list(lses), out_dtype=torch.bfloat16, impl="triton")
        merge_states(outs, lses, impl="triton")


def rows_by_slot() -> None:
    for planes in ((656,), (128, 4), (129, 8)):
        width = sum(planes)
        for count, pages in ((5, 3), (1100, 20)):
            memory, slots = some_bytes(pages, 64 * width), holed(torch.randperm(pages * 64)[:count], pages * 64)
            store_rows(memory, slots, some_bytes(len(slots), width), planes=planes, page_size=64, impl="triton")
            gather_rows(memory, slots, planes=planes, page_size=64, impl="triton")
        tables = torch.tensor([[0, 2, 1], [4, -1, 2147480000]]).cuda()
        gather_sequences(memory, tables, [130, 70], planes=planes, page_size=64, impl="triton")


def rows_between_tables() -> None:
    for width in (656, 132, 7):
        source = torch.randint(0, 256, (50, width), dtype=torch.uint8).pin_memory()
        target = some_bytes(40, width)
        copy_rows(source, holed(torch.randint(0, 50, (30,)), 50), target, torch.randperm(40)[:30].cuda(), impl="triton")
        copy_rows(target, torch.arange(9).cuda(), some_bytes(9, width), torch.arange(9).cuda(), impl="triton")
    for count in (7, 1030):
        packed = FP8_MLA.pack(torch.randn(count, 512), torch.randn(count, 64)).cuda()
        unpack_rows(packed, None, row_format=FP8_MLA, page_size=1, impl="triton")
        unpack_rows(packed, holed(torch.arange(count), count), row_format=FP8_MLA, page_size=1, impl="triton")


def fused_store() -> None:
    for tokens, pages in ((1, 1), (77, 2), (300, 5), (2051, 33)):
        joint, slots = randn(tokens, 576, dtype=torch.bfloat16), holed(torch.randperm(pages * 64)[:tokens], pages * 64)
        weight = randn(512, dtype=torch.bfloat16)
        mla = MlaInput(joint[:, :512], joint[:, 512:], weight, 1e-5, some_bytes(pages, 64 * 656), FP8_MLA)
        key, norm = randn(tokens, 128, dtype=torch.bfloat16), randn(128, dtype=torch.bfloat16)
        index = IndexInput(key, norm, norm, 1e-6, some_bytes(pages, 64 * 132), FP8_INDEX)
        angles = RopeAngles.at(torch.arange(tokens).cuda(), 64, 8e6)
        norm_rope_store(slots, angles, mla=mla, index=index, page_size=64, impl="triton")
        norm_rope_store(slots, None, mla=mla, page_size=64, impl="triton")
        norm_rope_store(slots, None, index=index, page_size=64, impl="triton")


def attention() -> None:
    for impl in ("gluon", "triton"):
        for tokens, heads, columns in ((3, 64, 192), (1, 5, 70)):
            query, ids = randn(tokens, heads, 576, dtype=torch.bfloat16), torch.randint(0, 300, (tokens, columns))
            counts = torch.full((tokens,), columns - 5).cuda()
            some = {"scale": SCALE, "v_dim": 512, "impl": impl}
            sparse_mla(query, randn(300, 576, dtype=torch.bfloat16), holed(ids, 300), counts=counts, **some)
        packed = FP8_MLA.pack(torch.randn(300, 512), torch.randn(300, 64)).cuda()
        sparse_mla(query, packed, holed(ids, 300), row_format=FP8_MLA, **some)


def decode() -> None:
    for impl, row_format in (("triton", FP8_MLA), ("triton", BF16_MLA), ("gluon", FP8_MLA)):
        pool = row_format.pack(torch.randn(320, 512), torch.randn(320, 64)).cuda().view(5, -1)
        for tokens, heads, columns in ((1, 64, 320), (3, 5, 192), (140, 64, 64)):
            slots = holed(torch.randint(0, 320, (tokens, columns), dtype=torch.int32), 320)
            query = randn(tokens, heads, 576, dtype=torch.bfloat16)
            sparse_mla_decode(query, pool, slots, row_format=row_format, scale=SCALE, impl=impl)


def indexer_keys(count: int) -> tuple[IndexKeys, IndexKeys]:
    """Back to back, and the same number in pages of two requests."""
    flat = IndexKeys(torch.randn(count, 128).to(FP8).cuda(), torch.rand(count).cuda())
    blocks = -(-count // 64)
    tables = torch.randperm(2 * blocks).view(2, blocks)
    tables[1, -1] = 2147480000
    return flat, IndexKeys.from_pages(some_bytes(2 * blocks, 64 * 132), tables.cuda(), page_size=64)


def scores() -> None:
    flat, paged = indexer_keys(333)
    for impl in ("triton", "gluon"):
        for tokens in (1, 5):
            query, weights = torch.randn(tokens, 32, 128).to(FP8).cuda(), randn(tokens, 32)
            lens = torch.tensor([330, 0, 333, 1, 64][:tokens]).cuda()
            indexer_scores_fp8(query, weights, flat, kv_lens=lens, impl=impl)
            starts = torch.full((tokens,), 3).cuda()
            indexer_topk_fp8(query, weights, flat, kv_lens=lens.clamp(max=330), key_starts=starts, k=64, impl=impl)
        query, weights = torch.randn(4, 32, 128).to(FP8).cuda(), randn(4, 32)
        lens = torch.tensor([330, 331, 100, 101]).cuda()
        indexer_scores_fp8(query, weights, paged, kv_lens=lens, impl=impl)
        indexer_topk_fp8(query, weights, paged, kv_lens=lens, k=100, impl=impl)
    query, weights, keys = randn(5, 4, 128), randn(5, 4), randn(333, 128)
    indexer_scores(query, weights, keys, impl="triton")
    lens = torch.full((5,), 300).cuda()
    indexer_topk(query, weights, keys, key_starts=torch.arange(5).cuda(), kv_lens=lens, k=70, impl="triton")


def fused_selection() -> None:
    flat, _ = indexer_keys(5000)
    query, weights = torch.randn(256, 32, 128).to(FP8).cuda(), randn(256, 32)
    lens = torch.arange(4745, 5001).cuda()
    for order in ("score", "none"):
        indexer_topk_fp8(query, weights, flat, kv_lens=lens, k=512, sorted_by=order, workspace_bytes=1, impl="gluon")


def topk() -> None:
    for rows, columns, k in ((3, 5000, 2048), (2, 70000, 2048), (5, 100, 7), (1, 40000, 64)):
        lens = torch.randint(0, columns + 1, (rows,)).cuda()
        for order in ("score", "position", "none"):
            topk_select(randn(rows, columns), k, lengths=lens, sorted_by=order, impl="triton")
        topk_select(randn(rows, columns), k, impl="triton")
    merge_orders(torch.randint(-(2**62), 2**62, (3, 5000)).cuda(), 2048, impl="triton")


def routing() -> None:
    for tokens, experts, k in ((1, 8, 2), (77, 96, 8), (300, 256, 8)):
        chosen, gates = route(randn(tokens, experts), randn(experts), k=k, impl="triton")
        groups = group_by_expert(chosen, experts, impl="triton")
        combine(randn(tokens * k, 200, dtype=torch.bfloat16), groups.slots, gates, impl="triton")


def feed_forward() -> None:
    """By whatever serves it."""
    counts = torch.tensor([5, 0, 70]).cuda()
    gate_up, down = torch.randn(3, 256, 256), torch.randn(3, 256, 128)
    x = randn(80, 256, dtype=torch.bfloat16)
    grouped_swiglu(x, counts, gate_up.bfloat16().cuda(), down.bfloat16().cuda())
    packed = [BlockFP8.quantise(weight) for weight in (gate_up, down)]
    grouped_swiglu(x, counts, *(BlockFP8(weight.values.cuda(), weight.scales.cuda()) for weight in packed))


def slots_of_positions() -> None:
    layout = KVLayout(2, 16, 16)
    positions, tables = holed(torch.randint(0, 200, (5, 70)), 4000), torch.randint(-1, 9, (2, 7)).cuda()
    for dtype in (torch.int32, torch.int64):
        out = torch.zeros(5, 70, dtype=dtype).cuda()
        selected_slots(
            out, positions, torch.tensor([0, 1, -1, 1, 7]).cuda(), tables, layout=layout, rank=1, impl="triton"
        )


def control(*, relayed: bool) -> None:
    """No kernel of the library, but what the tools make of a right order that only mbarriers keep."""
    from tests.gpu.handshake_gluon import WIDTH, handshake

    assert torch.equal(handshake(6, relayed=relayed).cpu(), 6 * torch.arange(WIDTH, dtype=torch.int32) + 15)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        merge, rows_by_slot, rows_between_tables, fused_store, attention, decode, scores, fused_selection, topk,
        routing, feed_forward, slots_of_positions,
    )
}  # fmt: skip
CASES["control"], CASES["control_relayed"] = partial(control, relayed=False), partial(control, relayed=True)


def run_under(tool: str, case: str, folder: Path) -> dict[str, object]:
    """One case in a process of its own, under one tool."""
    command = [shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer", "--tool", tool]
    command += ["--error-exitcode", "1", sys.executable, "-m", "tests.gpu.sanitize", "--only", case]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    output = done.stdout + done.stderr
    (folder / f"{tool}_{case}.txt").write_text(output)
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    result = {"tool": tool, "case": case, "exit": done.returncode, "summary": found.group(1) if found else "none"}
    print(*result.values(), sep="  ", flush=True)
    if pairs := access_pairs(output):
        result["pairs"] = pairs
    return result


def access_pairs(output: str) -> list[str]:
    """The pairs of accesses that racecheck reports, as "write file:line - read file:line", each once."""
    pairs = set()
    for report in output.split("Race reported between ")[1:]:
        sites = re.findall(r"(Read|Write) access at \S+ in (\S+:\d+)", report.split("\n========= \n")[0])
        pairs |= {" - ".join(" ".join(site).lower() for site in sorted((sites[0], other))) for other in sites[1:]}
    return sorted(pairs)


def run_tools(tools: list[str], cases: list[str], out: Path) -> int:
    import triton

    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(run_under, tool, case, out.parent) for tool in tools for case in cases]
        results = [job.result() for job in jobs]
    version = subprocess.run(
        [shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer", "--version"],
        capture_output=True, text=True,
    ).stdout.strip().splitlines()[-1:]  # fmt: skip
    about = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "compute-sanitizer": "".join(version),
        "command": "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool TOOL --error-exitcode 1 "
        "python -m tests.gpu.sanitize --only CASE",
        "results": results,
    }
    out.write_text(json.dumps(about, indent=1) + "\n")
    return int(any(result["exit"] for result in results))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default=",".join(CASES), help="cases, by comma")
    parser.add_argument("--tools", default="", help="of compute-sanitizer, by comma")
    parser.add_argument("--out", type=Path, default=Path("sanitizer.json"), help="summary; full logs stand beside it")
    arguments = parser.parse_args()
    cases = arguments.only.split(",")
    if arguments.tools:
        return run_tools(arguments.tools.split(","), cases, arguments.out)
    torch.manual_seed(0)
    for case in cases:
        CASES[case]()
        torch.cuda.synchronize()
        print(case, "done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
