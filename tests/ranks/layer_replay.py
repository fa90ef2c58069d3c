"""Layers one by one from given inputs: what each does, however the layers before it rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cptools.kernels.rowwise import rms_norm
from cptools.step_plan import StepPlan
from models.glm53 import GLM53
from models.glm53.block import decoder_block, make_pass
from models.glm53.mtp import mtp_pass
from models.glm53.step import EngineCache, local_ids, local_rows, plan_step


@dataclass(frozen=True)
class LayerRun:
    """One layer in one step; rows are the step's, prompts packed and then decode rows."""

    inputs: Tensor
    """float32 [rows, hidden]"""
    selected: Tensor
    """int64 [rows, K]: the positions that each row attended to."""
    outputs: Tensor
    """float32 [rows, hidden]"""


def run_layers(
    model: GLM53,
    prompts: Sequence[list[int]],
    fed: Sequence[list[int]],
    *,
    chunk: int | None,
    mtp: bool = False,
    given: Sequence[Sequence[LayerRun]] | None = None,
) -> list[list[LayerRun]]:
    """All layers over a batch, step by step: chunks of its prompts, beside them one of the fed ids of each prompt that
    is done, in the last step all that are left of them. Collective; the result is the same on all ranks.

    mtp: after each step the MTP layer too, its inputs the hidden states of the step. given: the run whose inputs each
    layer gets instead of the output of the layer before it. The cached rows, indexer keys and selections are then made
    from these too.
    """
    cache = model.new_cache(sum(model.kv.layout.pages(len(p) + len(f)) for p, f in zip(prompts, fed, strict=True)))
    requests = [cache.open() for _ in prompts]
    done = dict.fromkeys(requests, 0)
    steps: list[list[LayerRun]] = []
    while True:
        left = {r: p[cache.lengths[r] :] for r, p in zip(requests, prompts, strict=True)}
        chunks = {r: ids[: chunk or len(ids)] for r, ids in left.items() if ids}
        decodes = {}
        for r, f in zip(requests, fed, strict=True):
            if r not in chunks and (ids := f[done[r] :][: 1 if chunks else None]):
                decodes[r] = ids
                done[r] += len(ids)
        if not chunks and not decodes:
            return steps
        steps.append(_step(model, cache, chunks, decodes, mtp, None if given is None else given[len(steps)]))


def _step(
    model: GLM53,
    cache: EngineCache,
    prompts: dict[int, list[int]],
    decodes: dict[int, list[int]],
    mtp: bool,
    given: Sequence[LayerRun] | None,
) -> list[LayerRun]:
    plan = plan_step(model, cache, prompts, decodes)
    kv, split = cache.kv.begin(plan), model.split.begin(plan)
    run = make_pass(model.config, kv, split)
    new_ids = {**prompts, **decodes}
    x = model.weights.embed[local_ids(model, plan, [token for ids in new_ids.values() for token in ids])]
    layers = []
    for layer, weights in enumerate(model.weights.layers):
        if given is not None:
            x = local_rows(model, plan, given[layer].inputs)
        y = decoder_block(x, layer, weights, run)
        layers.append(LayerRun(*(_all_rows(model, plan, part) for part in (x, run.selected.positions, y))))
        x = y
    if mtp:
        hidden = rms_norm(x, model.weights.norm, model.config.rms_norm_eps)
        if given is not None:
            hidden = local_rows(model, plan, given[-1].inputs)
        following = local_ids(model, plan, [token // 2 for ids in new_ids.values() for token in ids])
        y, selected = mtp_pass(model, kv, split, hidden, following)
        layers.append(LayerRun(*(_all_rows(model, plan, part) for part in (hidden, selected, y))))
    for request, ids in new_ids.items():
        cache.lengths[request] += len(ids)
    return layers


def _all_rows(model: GLM53, plan: StepPlan, local: Tensor) -> Tensor:
    own = plan.prompt_rows
    return torch.cat([model.cp.unshard(local[:own], plan.prompt), local[own:]]).clone()
