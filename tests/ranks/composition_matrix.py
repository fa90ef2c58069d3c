"""Every legal composition of the model's splits on up to four ranks, against one rank: docs/composition.md.

    python -m tests.ranks.composition_matrix

{PCP 1, 2} x {DCP 1, 2, 4} x {TP 1, 2} x {EP 1, all} x {DP 1, 2} as far as they are legal, each with fp32 and FP8 rows,
prompts in one piece and in chunks, plain and with three drafts of the MTP layer. What a cell is held to:

- without TP, the bits of one rank whose decode attention is summed in as many parts (`decode_parts`): logits of all
  prompt and decode rows, selections, tokens;
- with TP and fp32 rows, the tokens of one rank and logits within 1e-4, on those prompts that one rank answers alike
  when it adds in another order (heads and widths reversed); the others are counted;
- with TP and FP8 rows, each layer's output within 1e-4 when it gets the inputs of one rank, its selections the same: a
  difference of one bit may be a step of FP8, and what follows from it no longer says anything about the split.

Replicas (DP) run other prompts for other numbers of tokens. Exit status 1 if a cell is not as it should be.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cptools import ParallelConfig, ParallelGroups
from cptools.step_plan import StepPlan
from models.glm53 import GLM53
from tests.checkpoints import TINY, random_prompts, save_guessable
from tests.ranks.harness import run_ranks
from tests.ranks.layer_replay import LayerRun, run_layers
from tests.ranks.second_order import reversed_sums

# Every kind of layer in three, for many compositions to fit the suite: dense, mixtures with an indexer and without.
CONFIG = replace(
    TINY,
    num_hidden_layers=3,
    indexer_types=("full", "shared", "full"),
    mlp_layer_types=("dense", "sparse", "sparse"),
    num_nextn_predict_layers=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
)
LENGTHS, CHUNK, NEW_TOKENS = (40, 1, 5, 19), 23, 3
TOLERANCE = 1e-4
SPLITS = [
    *(ParallelConfig(pcp=pcp, dcp=dcp) for pcp, dcp in ((1, 1), (2, 1), (1, 2), (2, 2))),
    *(ParallelConfig(pcp=pcp, dcp=dcp, tp=2) for pcp, dcp in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4))),
]
REPLICAS = [ParallelConfig(dp=2), ParallelConfig(dp=2, dcp=2, tp=2)]
SPREAD = [replace(split, ep=split.world_size) for split in (*SPLITS, *REPLICAS) if split.world_size > 1]
SIZES = sorted([*SPLITS, *SPREAD], key=lambda sizes: (sizes.dp, sizes.world_size, sizes.tp, sizes.ep > 1))


@dataclass(frozen=True)
class Mode:
    """How a cell's prompts are run."""

    kv_rows: str
    chunk: int | None
    draft_tokens: int

    def __str__(self) -> str:
        drafts = f"MTP{self.draft_tokens}" if self.draft_tokens else "plain"
        return f"{self.kv_rows} {'one-shot' if self.chunk is None else 'chunked'} {drafts}"


MODES = [Mode(*mode) for mode in itertools.product(("fp32", "fp8"), (None, CHUNK), (0, 3))]


@dataclass(frozen=True)
class Answers:
    """What a model made of a batch."""

    ids: list[list[int]]
    logits: list[Tensor]
    """Per prompt float32 [rows, vocab], of its prompt and decode rows."""
    selections: list[list[Tensor]]
    """Per prompt and layer int64 [rows, K]."""
    accepted: list[int]
    """How many verifications accepted 0, 1, ... drafts."""

    def digest(self) -> str:
        tensors = [*self.logits, *(layer for layers in self.selections for layer in layers)]
        return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


@dataclass(frozen=True)
class CellResult:
    """What one rank says of a cell."""

    replica: int
    ids: list[list[int]]
    digest: str
    logits: list[Tensor]
    layer_difference: float = 0.0
    selections_differ: int = 0


def is_exact(sizes: ParallelConfig) -> bool:
    return sizes.tp == 1


def is_by_layer(sizes: ParallelConfig, mode: Mode) -> bool:
    return not is_exact(sizes) and mode.kv_rows == "fp8"


def work_of(replica: int) -> list[list[int]]:
    """The prompts of a replica."""
    prompts = random_prompts(LENGTHS, CONFIG.vocab_size)
    return prompts if replica == 0 else prompts[1:3]


def new_tokens_of(replica: int, mode: Mode) -> int:
    """The second replica is done before the first; enough that all drafts are verified at least once."""
    return NEW_TOKENS - replica if not mode.draft_tokens else mode.draft_tokens + 2 - replica


def answer(model: GLM53, replica: int, mode: Mode) -> Answers:
    """Collective over the ranks of the replica, and of all where they share experts."""
    prompts, new_tokens = work_of(replica), new_tokens_of(replica, mode)
    layers = model.config.num_hidden_layers
    selections: list[list[list[Tensor]]] = [[[] for _ in range(layers)] for _ in prompts]

    def observe(layer: int, plan: StepPlan, prompt_topk: Tensor, decode_topk: Tensor) -> None:
        rows = [*model.cp.unshard(prompt_topk, plan.prompt).split(list(plan.prompt.query_lens))]
        rows += decode_topk.split(list(plan.decode_query_lens))
        left = [len(p) + new_tokens - 1 - sum(map(len, own[layer])) for p, own in zip(prompts, selections, strict=True)]
        prefilling = [i for i, n in enumerate(left) if n >= new_tokens]
        decoding = [i for i, n in enumerate(left) if 0 < n < new_tokens]
        for i, part in zip([*prefilling, *decoding], rows, strict=True):
            selections[i][layer].append(part.clone())

    out = model.generate_batch(
        prompts,
        new_tokens,
        chunk=mode.chunk,
        prompt_logits="all",
        draft_tokens=mode.draft_tokens,
        # Rows of rejected drafts select too, and are none of the result.
        observer=None if mode.draft_tokens else observe,
    )
    logits = [torch.cat(pair) for pair in zip(out.prompt_logits, out.decode_logits, strict=True)]
    return Answers(out.ids, logits, [[torch.cat(parts) for parts in own if parts] for own in selections], out.accepted)


def replay(model: GLM53, mode: Mode, given: list[list[LayerRun]] | None = None) -> list[list[LayerRun]]:
    """All layers over the prompts and some decode steps, in a cell that is compared by layer. Collective."""
    prompts = work_of(0)
    fed = [[token + 7 * i for i in range(2 + mode.draft_tokens)] for token in range(len(prompts))]
    return run_layers(model, prompts, fed, chunk=mode.chunk, mtp=mode.draft_tokens > 0, given=given)


Traces = dict[tuple[int, Mode], list[list[LayerRun]]]


def run_cells(
    rank: int, world_size: int, path: str, sizes: list[ParallelConfig], traces: Traces
) -> list[dict[Mode, CellResult]]:
    """All modes of some sizes of this world, on one rank."""
    return [_run_modes(path, split, traces) for split in sizes]


def _run_modes(path: str, sizes: ParallelConfig, traces: Traces) -> dict[Mode, CellResult]:
    results = {}
    with ParallelGroups.from_world(sizes) as groups:
        replica = groups.coords.dp_rank
        rows = dict.fromkeys(mode.kv_rows for mode in MODES)
        models = {kv_rows: GLM53.from_pretrained(path, parallel=groups, kv_rows=kv_rows) for kv_rows in rows}
        for mode in MODES:
            model = models[mode.kv_rows]
            if is_by_layer(sizes, mode):
                want = [layer for step in traces[sizes.dcp, mode] for layer in step]
                got = [layer for step in replay(model, mode, traces[sizes.dcp, mode]) for layer in step]
                pairs = list(zip(got, want, strict=True))
                difference = float(torch.cat([(a.outputs - b.outputs).abs().flatten() for a, b in pairs]).max())
                differ = sum(int((a.selected != b.selected).any(1).sum()) for a, b in pairs)
                results[mode] = CellResult(replica, [], "", [], difference, differ)
            else:
                found = answer(model, replica, mode)
                results[mode] = CellResult(replica, found.ids, found.digest(), [] if is_exact(sizes) else found.logits)
    return results


class OneRank:
    """What cells are compared with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[tuple[str, int, int, int], Answers] = {}
        self.traces: Traces = {}
        for sizes in SIZES:
            for mode in MODES:
                if is_by_layer(sizes, mode):
                    if (sizes.dcp, mode) not in self.traces:
                        self.traces[sizes.dcp, mode] = replay(self.model(mode.kv_rows, sizes.dcp), mode)
                    continue
                for replica in range(sizes.dp):
                    key = (mode.kv_rows, sizes.dcp, replica, mode.draft_tokens)
                    if key not in self.answers:
                        self.answers[key] = answer(self.model(*key[:2]), replica, replace(mode, chunk=None))
        model = self.model("fp32", 1)
        model.weights = reversed_sums(model.weights)
        other, usual = answer(model, 0, MODES[0]), self.answers["fp32", 1, 0, 0]
        self.orders_differ = other.digest() != usual.digest()
        """Whether the second order moved any bit: without that it rejects nothing."""
        self.kept = [i for i in range(len(LENGTHS)) if _alike(other, usual, i)]

    def model(self, kv_rows: str, decode_parts: int) -> GLM53:
        return GLM53.from_pretrained(self.path, kv_rows=kv_rows, decode_parts=decode_parts)  # type: ignore[arg-type]

    def verdict(self, sizes: ParallelConfig, mode: Mode, ranks: Sequence[CellResult]) -> tuple[str, bool]:
        """What a cell is, in the words of the table, and whether that is what it should be."""
        if is_by_layer(sizes, mode):
            differences = [result.layer_difference for result in ranks]
            differ = sum(result.selections_differ for result in ranks)
            equal = all(difference <= TOLERANCE for difference in differences) and differ == 0
            return ("layers" if equal else f"layers differ by {differences}, {differ} selections"), equal
        for result in ranks:
            want = self.answers[mode.kv_rows, sizes.dcp, result.replica, mode.draft_tokens]
            if is_exact(sizes):
                if (result.ids, result.digest) != (want.ids, want.digest()):
                    return f"replica {result.replica} differs", False
                continue
            usable = [work_of(0)[i] for i in self.kept]
            kept = [i for i, prompt in enumerate(work_of(result.replica)) if prompt in usable]
            for i in kept:
                difference = float((result.logits[i] - want.logits[i]).abs().max())
                if result.ids[i] != want.ids[i] or not difference <= TOLERANCE:
                    return f"replica {result.replica} differs by {difference:.1e}", False
        replicas = {(result.replica, result.digest) for result in ranks}
        if len(replicas) != sizes.dp:
            return "ranks differ", False
        return "bits" if is_exact(sizes) else "tokens", True


def _alike(a: Answers, b: Answers, prompt: int) -> bool:
    selections = zip(a.selections[prompt], b.selections[prompt], strict=True)
    return (
        a.ids[prompt] == b.ids[prompt]
        and all(torch.equal(x, y) for x, y in selections)
        and float((a.logits[prompt] - b.logits[prompt]).abs().max()) <= TOLERANCE
    )


@dataclass(frozen=True)
class Table:
    rows: list[str]
    """Markdown."""
    wrong: list[str]
    """What is not as it should be."""
    accepted: list[int]
    """Verifications on one rank that accepted 0, 1, ... drafts."""
    rejected: int
    """Prompts of which another order of summation makes something else; cells with TP are not held to them."""
    orders_differ: bool
    cells: int

    @property
    def rejections(self) -> str:
        return f"{self.rejected} of {len(LENGTHS)} prompts are too close to call for cells with TP"


def run_matrix(folder: Path) -> Table:
    """All cells: one start of two ranks, and one of four."""
    path = save_guessable(folder / "checkpoint", CONFIG)
    one = OneRank(path)
    results: dict[ParallelConfig, list[dict[Mode, CellResult]]] = {}
    for world_size in sorted({sizes.world_size for sizes in SIZES}):
        own = [sizes for sizes in SIZES if sizes.world_size == world_size]
        by_rank = run_ranks(run_cells, world_size, str(path), own, one.traces, timeout=250)
        results |= {sizes: [ranks[i] for ranks in by_rank] for i, sizes in enumerate(own)}
    rows = [
        "| ranks | DP | PCP | DCP | TP | EP | " + " | ".join(map(str, MODES)) + " |",
        "|" + "---|" * (6 + len(MODES)),
    ]
    wrong = []
    for sizes in SIZES:
        texts = []
        for mode in MODES:
            text, right = one.verdict(sizes, mode, [result[mode] for result in results[sizes]])
            texts.append(text)
            wrong += [] if right else [f"{sizes}, {mode}: {text}"]
        numbers = (sizes.world_size, sizes.dp, sizes.pcp, sizes.dcp, sizes.tp, sizes.ep)
        rows.append("| " + " | ".join([*map(str, numbers), *texts]) + " |")
    return Table(
        rows,
        wrong,
        accepted=one.answers["fp32", 1, 0, 3].accepted,
        rejected=len(LENGTHS) - len(one.kept),
        orders_differ=one.orders_differ,
        cells=len(SIZES) * len(MODES),
    )


def main() -> int:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        table = run_matrix(Path(folder))
    print("\n".join(table.rows))
    print(f"\n{table.cells} cells, {len(table.wrong)} wrong, {time.perf_counter() - start:.0f} s; {table.rejections}")
    print("\n".join(table.wrong))
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
