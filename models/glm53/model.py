"""GLM-5.3: weights, the forward pass over one step, and the simple calls around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cptools import LoadBalancedCPShard, LSEMerge, ParallelGroups, RoundRobinKVShard
from cptools.block_tables import BlockTables
from cptools.cp_kv import ContextParallelKV, check_decode_parts
from cptools.kernels.rowwise import linear, rms_norm
from cptools.kernels.sampling import Sampling, SamplingRows, Verified, verify_drafts
from cptools.page_allocator import PageAllocator, Pages
from cptools.spans import Span, no_span
from cptools.step_rows import DecodeRows

from .batch import BatchOutput, Progress, Speculation, run_batch
from .block import Pass, SelectionObserver, decoder_block, make_pass
from .config import GLM53Config
from .layer_split import LayerSplit
from .mtp import mtp_pass, mtp_weights
from .rank_modules import RankModules
from .row_formats import row_formats
from .speculative import Continuing, check_drafts, draft, draft_decode
from .step import EngineCache, StepResult, check_ids, check_requests, check_tokens, local_ids, plan_step
from .weight_split import WeightSplit
from .weights import LoadProgress, ModelWeights, load_weights


class GLM53:
    """A GLM-5.3 family model on one rank of an engine; every rank makes the same calls with the same arguments.

    ``cp``, ``kv``, ``merge`` and ``split`` are the parallel modules the model works through; ``weights`` are the part
    of this rank. Not thread-safe.
    """

    def __init__(
        self,
        config: GLM53Config,
        weights: ModelWeights,
        *,
        cp: LoadBalancedCPShard,
        kv: RoundRobinKVShard,
        merge: LSEMerge | None = None,
        split: LayerSplit | None = None,
        kv_rows: Literal["fp32", "bf16", "fp8"] = "fp32",
        decode_parts: int = 1,
        sparse_mla_force_mqa: bool = True,
    ) -> None:
        self.mla, self.index = row_formats(config, kv_rows)
        check_decode_parts(decode_parts, kv)
        self.config, self.weights = config, weights
        self.cp, self.kv, self.merge = cp, kv, merge
        self.split = LayerSplit.alone(config.n_routed_experts) if split is None else split
        self.decode_parts = decode_parts
        self.span: Span = no_span
        """What the parts of a step run in; set it to `cptools.spans.nvtx_span` to see them in a profile."""
        # A prompt of at most top-k tokens selects all of itself, so dense attention over it is the same function.
        self.dense_up_to = 0 if sparse_mla_force_mqa else config.index_topk

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        parallel: ParallelGroups | None = None,
        kv_rows: Literal["fp32", "bf16", "fp8"] = "fp32",
        latent_norm_eps: float | None = None,
        decode_parts: int = 1,
        sparse_mla_force_mqa: bool = True,
        page_size: int = 64,
        interleave: int = 1,
        keep_fp8: bool = False,
        progress: LoadProgress | None = None,
    ) -> GLM53:
        """Load a checkpoint directory of released tensor names (FP32, BF16 or block-FP8, dequantised to ``dtype``),
        of which a rank reads its part.

        parallel: groups of this rank's engine, not owned; without it the model runs alone. kv_rows: format of cached
        rows. latent_norm_eps: default is config.json's, else 1e-5. decode_parts: sum decode attention as that many
        DCP ranks would. sparse_mla_force_mqa: False sends prompts of at most top-k tokens through dense attention.
        interleave, page_size: of the KV layout. keep_fp8: block-FP8 matrices stay so, and products with them quantise
        their rows. progress: told how many bytes are read, see `progress_bar`. Local, no communication.

        Raises ValueError, on all ranks alike, on a config or checkpoint that does not fit, naming every fault.
        """
        config = GLM53Config.from_pretrained(path, latent_norm_eps=latent_norm_eps)

        def weights(part: WeightSplit) -> ModelWeights:
            return load_weights(
                path, config, device=device, dtype=dtype, split=part, keep_fp8=keep_fp8, progress=progress
            )

        return cls.over(
            parallel,
            config,
            weights,
            kv_rows=kv_rows,
            decode_parts=decode_parts,
            sparse_mla_force_mqa=sparse_mla_force_mqa,
            page_size=page_size,
            interleave=interleave,
        )

    @classmethod
    def over(
        cls,
        parallel: ParallelGroups | None,
        config: GLM53Config,
        weights: Callable[[WeightSplit], ModelWeights],
        *,
        kv_rows: Literal["fp32", "bf16", "fp8"] = "fp32",
        decode_parts: int = 1,
        sparse_mla_force_mqa: bool = True,
        page_size: int = 64,
        interleave: int = 1,
    ) -> GLM53:
        """The model of this rank of an engine, with the weights that ``weights`` makes of its part, such as

            lambda part: random_weights(config, device="cuda", dtype=torch.bfloat16, keep_fp8=True, split=part)

        Other arguments as in `from_pretrained`. Local, no communication. Raises ValueError, on all ranks alike and
        before any weight is made, on other arguments that cannot be, such as sizes of the engine that do not divide
        those of the model.
        """
        if not isinstance(sparse_mla_force_mqa, bool):
            raise ValueError(f"sparse_mla_force_mqa={sparse_mla_force_mqa!r} must be True or False")
        row_formats(config, kv_rows)
        modules = RankModules.over(parallel, config, interleave=interleave, page_size=page_size)
        check_decode_parts(decode_parts, modules.kv)
        return cls(
            config,
            weights(modules.part),
            cp=modules.cp,
            kv=modules.kv,
            merge=modules.merge,
            split=modules.split,
            kv_rows=kv_rows,
            decode_parts=decode_parts,
            sparse_mla_force_mqa=sparse_mla_force_mqa,
        )

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def max_positions(self) -> int:
        """Longest sequence."""
        return self.config.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def capturable(self) -> bool:
        """Whether `decode_hidden` may be captured in a CUDA graph: not where replicas exchange rows with experts."""
        return self.device.type == "cuda" and (self.split.experts.world_size == 1 or self.split.expert_sum is not None)

    @property
    def lockstep(self) -> bool:
        """Replicas share experts, so they make equally many passes of each kind."""
        return self.split.lockstep.world_size > 1

    def checks(self) -> AbstractContextManager[None]:
        """For what may raise before the first pass of a step: replicas in lockstep learn of it instead of waiting."""
        return self.split.lockstep.checks()

    def check_engine(self, cache: EngineCache, draft_tokens: int) -> None:
        """ValueError unless steps can go over this cache and make so many drafts of a request. Local."""
        check_requests(self, cache, {})
        if draft_tokens:
            check_drafts(self, draft_tokens)

    def new_cache(self, num_pages: int, *, allocator: Pages | None = None) -> EngineCache:
        """An empty cache of ``num_pages`` pages a layer on this rank, MTP layer included. Local.

        A request of n tokens needs ``kv.layout.pages(n)`` pages. allocator: who counts their users, such as a pool that
        caches prefixes. Raises ValueError on a number below 0, or one that is not the allocator's.
        """
        allocator = PageAllocator(num_pages) if allocator is None else allocator
        if allocator.num_pages != num_pages:
            raise ValueError(f"an allocator of {allocator.num_pages} pages for a cache of {num_pages}")
        kv = ContextParallelKV(
            cp=self.cp,
            kv=self.kv,
            merge=self.merge,
            mla=self.mla,
            index=self.index,
            num_layers=self.config.num_cache_layers,
            index_layers=self.config.index_layers,
            num_pages=num_pages,
            decode_parts=self.decode_parts,
            device=self.device,
        )
        return EngineCache(kv, BlockTables(self.kv.layout, allocator))

    def step(
        self,
        cache: EngineCache,
        *,
        prompts: Mapping[int, Sequence[int]] | None = None,
        decodes: Mapping[int, Sequence[int]] | None = None,
        observer: SelectionObserver | None = None,
    ) -> StepResult:
        """Compute the next tokens of some requests: the engine's unit of work.

        prompts: new prompt ids (a chunk, a whole prompt, a further turn) of requests, behind what they have cached.
        decodes: sampled ids, one or more (verification), of requests. The phase decides the path of a row, never the
        number of rows. Collective: per layer one all-gather of new rows (PCP), and with DCP the context gathers of
        prompts and, for decode rows, the exchange of candidates and the LSE merge; with TP two sums, with EP in a
        mixture the exchange of experts. Replicas that share experts (dp > 1, ep > 1) take every step together, one
        without work with no prompts and no decodes.

        Raises ValueError (bad ids, lengths, requests) and PoolExhausted (pages) on all ranks alike, before any work
        and without a change of state; ValueError too if another replica refused, which leaves pages reserved.
        """
        with self.split.lockstep.checks():
            prompt_ids = check_requests(self, cache, prompts or {})
            decode_ids = check_requests(self, cache, decodes or {})
            plan = plan_step(self, cache, prompt_ids, decode_ids)
        split = self.split.begin(plan)
        new_ids = {**prompt_ids, **decode_ids}
        kv = cache.kv.begin(plan, dense_up_to=self.dense_up_to)
        run = make_pass(self.config, kv, split, observer, plan)
        hidden = self._forward(local_ids(self, plan, [token for ids in new_ids.values() for token in ids]), run)
        for request, ids in new_ids.items():
            cache.lengths[request] += len(ids)
        return StepResult(plan, kv, split, hidden, cache, {request: cache.lengths[request] for request in new_ids})

    def decode_hidden(self, cache: ContextParallelKV, rows: DecodeRows, ids: Tensor) -> Tensor:
        """Hidden states [T, hidden] after the final norm of decode rows whose data are on the device. Collective.

        ids: int64 [T] on the device, of padding rows any token. Nothing is checked, and no length is kept: this is the
        part of a step that a CUDA graph is captured over. No sync where `capturable`.
        """
        return self._forward(ids, make_pass(self.config, cache.begin_decode(rows), self.split.begin_decode(len(rows))))

    def _forward(self, ids: Tensor, run: Pass) -> Tensor:
        run.span = self.span
        x = self.weights.embed[ids]
        for layer, weights in enumerate(self.weights.layers):
            x = decoder_block(x, layer, weights, run)
        return rms_norm(x, self.weights.norm, self.config.rms_norm_eps)

    def mtp_step(self, result: StepResult, next_ids: Sequence[int]) -> Tensor:
        """Run the MTP layer over the rows of a step -> [local rows, hidden]; ``logits`` of it are draft logits.

        next_ids: for each token of the step, prompts packed and then decode rows, the token that follows it.
        Collective as one layer of a step. Raises ValueError on all ranks alike if they are not as many or no tokens,
        or if a request of the step has gone on since.
        """
        plan = result.plan
        mtp_weights(self.weights)
        result.check_current()
        ids = check_tokens(self.config, "next_ids", next_ids)
        if len(ids) != plan.prompt.num_tokens + plan.decode_rows:
            raise ValueError(f"{len(ids)} next_ids for {plan.prompt.num_tokens} + {plan.decode_rows} rows")
        return mtp_pass(self, result.kv, result.split, result.hidden, local_ids(self, plan, ids))[0]

    def draft_prompts(
        self, result: StepResult, next_ids: Sequence[int], ending: Sequence[int], tokens: Tensor, draft_tokens: int
    ) -> Tensor:
        """Drafts int64 [E, k] behind the first tokens int64 [E] of prompts that end in a step of prompts alone.

        next_ids: for each prompt token of the step, packed, the token that follows it. ending: places of those prompts.
        The drafts are the most likely ones. Collective as `speculative.draft`, also where no prompt ends, and with its
        ValueErrors, also unless there is a first token for each prompt that ends.
        """
        if result.plan.decode_rows or tokens.shape != (len(ending),):
            what = f"tokens {tuple(tokens.shape)} of {len(ending)} ending prompts"
            raise ValueError(f"{what} in a step with {result.plan.decode_rows} decode rows")
        continuing = Continuing.of(result.plan, ending, draft_tokens, self.device)
        first = torch.nn.functional.pad(tokens.unsqueeze(1), (0, draft_tokens), value=-1)
        verified = Verified(first, torch.zeros_like(tokens))
        return draft(self, result, continuing, verified, next_ids, draft_tokens=draft_tokens).tokens

    def decode_round(
        self, cache: ContextParallelKV, rows: DecodeRows, ids: Tensor, sampling: SamplingRows
    ) -> tuple[Verified, Tensor, Tensor]:
        """A round of R requests with k drafts each: what became of the drafts, new ones int64 [R, k], and the logits of
        the rows float32 [R, k + 1, vocab].

        ids: int64 [R, k + 1], the last token of each and its drafts, which were the most likely ones. rows: those of
        ids. sampling: of the R requests. Collective and without a sync as `decode_hidden`, and as capturable.
        """
        requests, each = ids.shape
        hidden = self.decode_hidden(cache, rows, ids.flatten())
        logits = self.logits(hidden).view(requests, each, -1)
        first = rows.kv_lens.view(requests, each)[:, 0]
        counts = torch.where(first > 0, each - 1, 0)  # none of padding
        verified = verify_drafts(logits, ids[:, 1:], sampling, first, counts=counts)
        drafts = draft_decode(self, cache, rows, hidden, verified)
        return verified, drafts.tokens, logits

    def prompt_logits(self, result: StepResult) -> Tensor:
        """Logits of all prompt rows of a step, float32 [T, vocab] in packed order on every rank. Collective (PCP)."""
        local = self.logits(result.hidden[: result.plan.prompt_rows])
        return self.cp.unshard(local, result.plan.prompt)

    def last_logits(self, result: StepResult) -> Tensor:
        """Logits of each prompt's last row, then of all decode rows, float32 on every rank. Collective (PCP)."""
        prompt, rows = result.plan.prompt, result.plan.prompt_rows
        ends = torch.tensor(prompt.query_lens, dtype=torch.int64).cumsum(0) - 1
        last = self.cp.unshard_rows(result.hidden[:rows], prompt, ends)
        return self.logits(torch.cat([last, result.hidden[rows:]]))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]. Local."""
        return linear(hidden, self.weights.lm_head).float()

    def prefill_logits(self, token_ids: Sequence[int], *, last_only: bool = False) -> Tensor:
        """Logits of a whole prompt, [T, vocab] float32, or [1, vocab] of its last token; the same on all ranks."""
        out = run_batch(self, [token_ids], 1, prompt_logits="last" if last_only else "all")
        return out.prompt_logits[0]

    def mtp_logits(self, token_ids: Sequence[int], next_token: int) -> Tensor:
        """Draft logits [T, vocab] float32 of a whole prompt followed by ``next_token``; the same on all ranks."""
        ids = check_ids(self.config, "token_ids", token_ids, 0)
        cache = self.new_cache(self.kv.layout.pages(len(ids)))
        result = self.step(cache, prompts={cache.open(): ids})
        drafts = self.mtp_step(result, [*ids[1:], next_token])
        return self.cp.unshard(self.logits(drafts), result.plan.prompt)

    def generate(self, token_ids: Sequence[int], max_new_tokens: int, *, draft_tokens: int = 0) -> list[int]:
        """Greedy continuation: new ids only, stops after an eos id. Drafts do not change it."""
        return run_batch(
            self,
            [token_ids],
            max_new_tokens,
            stop_at_eos=True,
            decode_logits=False,
            speculation=Speculation(draft_tokens),
        ).ids[0]

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        chunk: int | None = None,
        prompt_logits: Literal["last", "all"] = "last",
        stop_at_eos: bool = False,
        sampling: Sequence[Sampling] | Sampling | None = None,
        draft_tokens: int = 0,
        most_likely_drafts: bool = False,
        synthetic_acceptance_length: float | None = None,
        observer: SelectionObserver | None = None,
        progress: Progress | None = None,
        cache: EngineCache | None = None,
    ) -> BatchOutput:
        """Prefill a batch and decode it; the same result on all ranks, and for each prompt as if alone.

        chunk: a request computes at most that many prompt tokens a step; a request whose prompt is done decodes
        beside those still prefilling. sampling: of all prompts or of each, greedy by default; prompts that share one
        draw with the same random numbers, `replace(sampling, request=i)` tells them apart. cache: pages to use (its
        requests are closed at the end); by default one that just fits. observer sees every layer's selection, rows of
        rejected drafts among them, and progress is called after each step. Collective; replicas that share experts
        (dp > 1, ep > 1) call it together, each with its own prompts or none, and one that is done takes part in the
        others' steps.

        draft_tokens: so many drafts k of the MTP layer are verified with each token; a prompt needs pages for k more
        tokens. Greedy results stay as they are; what is drawn keeps its distribution, and other tokens are drawn, which
        do not depend on max_new_tokens (but verification ends at max_position_embeddings). most_likely_drafts: do not
        draw drafts.
        synthetic_acceptance_length: accept drafts by lot, so many tokens a round in the mean, to measure speed; the
        output is marked.

        Raises ValueError, on all ranks and before any work, on an empty prompt, a token outside the vocabulary, a
        length beyond max_position_embeddings, a cache that is too small, or drafts without an MTP layer.
        """
        return run_batch(
            self,
            prompts,
            max_new_tokens,
            chunk=chunk,
            prompt_logits=prompt_logits,
            stop_at_eos=stop_at_eos,
            sampling=sampling,
            speculation=Speculation(draft_tokens, most_likely_drafts, synthetic_acceptance_length),
            observer=observer,
            progress=progress,
            cache=cache,
        )
