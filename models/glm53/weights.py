"""Released GLM-5.3 checkpoints: the tensors they hold, and reading and writing them.

FP32, BF16 and block-FP8 checkpoints read alike: a tensor's own dtype decides, since ``modules_to_not_convert`` of the
released config.json names modules that do not exist.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cptools.kernels.block_fp8 import dequantise_blocks, quantise_blocks, scale_shape

from .block_fp8 import scale_name
from .config import GLM53Config

Shape = tuple[int, ...]
# What the released block-FP8 build leaves in BF16, besides everything that is not a matrix.
_UNQUANTISED = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight")


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """MLA of one layer, ``kv_b_proj`` already split per head for the absorbed form."""

    q_a: Tensor  # [q_lora_rank, hidden]
    q_a_norm: Tensor
    q_b: Tensor  # [heads * (nope + rope), q_lora_rank], per head nope then rope
    kv_a: Tensor  # [latent + rope, hidden]
    kv_a_norm: Tensor
    w_uk: Tensor  # [heads, nope, latent]
    w_uv: Tensor  # [heads, v, latent]
    o: Tensor  # [hidden, heads * v]


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    wq_b: Tensor  # [index_heads * index_dim, q_lora_rank]
    wk: Tensor  # [index_dim, hidden]
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor  # [index_heads, hidden], always fp32


@dataclass(frozen=True, eq=False)
class DenseFFNWeights:
    gate_up: Tensor  # [2 * width, hidden]: one product makes both, gate first
    down: Tensor  # [hidden, width]


@dataclass(frozen=True, eq=False)
class MoEWeights:
    router: Tensor  # [experts, hidden], always fp32
    bias: Tensor  # [experts], always fp32; it selects experts and does not weigh them
    gate_up: Tensor  # [experts, 2 * width, hidden], gate first
    down: Tensor  # [experts, hidden, width]
    shared: DenseFFNWeights


@dataclass(frozen=True, eq=False)
class LayerWeights:
    input_norm: Tensor
    post_attention_norm: Tensor
    attention: AttentionWeights
    indexer: IndexerWeights | None  # None: the layer uses an earlier layer's top-k
    ffn: DenseFFNWeights | MoEWeights


@dataclass(frozen=True, eq=False)
class MTPWeights:
    enorm: Tensor
    hnorm: Tensor
    eh_proj: Tensor  # [hidden, 2 * hidden], embedding half first
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True, eq=False)
class ModelWeights:
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor  # [vocab, hidden]
    mtp: MTPWeights | None


def expected_tensors(config: GLM53Config) -> dict[str, Shape]:
    """Released names and shapes of all parameters; scales of block-FP8 matrices are not among them."""
    h = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (config.vocab_size, h),
    }
    for layer in range(config.num_cache_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_tensors(config, layer)}
    return shapes


def _layer_tensors(config: GLM53Config, layer: int) -> Iterator[tuple[str, Shape]]:
    h, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    yield "input_layernorm.weight", (h,)
    yield "post_attention_layernorm.weight", (h,)
    yield "self_attn.q_a_proj.weight", (config.q_lora_rank, h)
    yield "self_attn.q_a_layernorm.weight", (config.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + config.qk_rope_head_dim, h)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield "self_attn.o_proj.weight", (h, heads * config.v_head_dim)
    if config.is_full(layer):
        yield "self_attn.indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        yield "self_attn.indexer.wk.weight", (config.index_head_dim, h)
        yield "self_attn.indexer.k_norm.weight", (config.index_head_dim,)
        yield "self_attn.indexer.k_norm.bias", (config.index_head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (config.index_n_heads, h)
    if config.is_sparse(layer):
        yield "mlp.gate.weight", (config.n_routed_experts, h)
        yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
        for expert in range(config.n_routed_experts):
            yield from _swiglu_tensors(f"mlp.experts.{expert}.", h, config.moe_intermediate_size)
        # Several shared experts are stored as one wide one.
        yield from _swiglu_tensors("mlp.shared_experts.", h, config.moe_intermediate_size * config.n_shared_experts)
    else:
        yield from _swiglu_tensors("mlp.", h, config.intermediate_size)
    if layer == config.num_hidden_layers:
        yield "enorm.weight", (h,)
        yield "hnorm.weight", (h,)
        yield "eh_proj.weight", (h, 2 * h)
        yield "shared_head.norm.weight", (h,)


def _swiglu_tensors(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def load_weights(
    path: str | Path, config: GLM53Config, *, device: torch.device | str, dtype: torch.dtype
) -> ModelWeights:
    """Read a checkpoint directory: model.safetensors, else the shards of its index, else all \\*.safetensors.

    Matrices and norms come in ``dtype``, router, router bias and ``weights_proj`` in fp32, block-FP8 dequantised.
    Before any tensor is read, one ValueError names every tensor that is missing, unexpected, misshaped, of a dtype
    that cannot be read, or FP8 without its scale.
    """
    with ExitStack() as open_files:
        files = [open_files.enter_context(_open(file)) for file in _checkpoint_files(Path(path))]
        checkpoint = _Checkpoint(files, config, torch.device(device), dtype)
        layers = [checkpoint.layer(layer) for layer in range(config.num_cache_layers)]
        mtp = checkpoint.mtp(layers.pop()) if config.num_nextn_predict_layers else None
        return ModelWeights(
            embed=checkpoint.read("model.embed_tokens.weight"),
            layers=tuple(layers),
            norm=checkpoint.read("model.norm.weight"),
            lm_head=checkpoint.read("lm_head.weight"),
            mtp=mtp,
        )


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} can not be read: {error}") from error


def _checkpoint_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        # Only which files there are: what a file holds is read from its own header.
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not JSON with a weight_map: {error!r}") from error
        if odd := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise ValueError(f"{index}: weight_map names {odd[0]!r}, which is no file of this directory")
        files = [path / name for name in sorted(names)]
    else:
        files = sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if absent or not files:
        raise ValueError(f"{path} lacks {', '.join(absent) or 'safetensors files'}")
    return files


class _Checkpoint:
    """Open safetensors files, checked against a config; hands out the weights of a model."""

    def __init__(self, files: Sequence[Any], config: GLM53Config, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.shapes = expected_tensors(config)
        self.file_of = {name: file for file in files for name in file.keys()}
        headers = {name: file.get_slice(name) for name, file in self.file_of.items()}
        self.stored = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        faults = _faults(self.stored, self.shapes, config.weight_block_size)
        copies = Counter(name for file in files for name in file.keys())
        faults += [f"{name} is in {count} files" for name, count in copies.items() if count > 1]
        if faults:
            raise ValueError("the checkpoint does not fit its config.json:\n" + "\n".join(f"- {f}" for f in faults))

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        result = torch.empty(self.shapes[name], dtype=dtype or self.dtype, device=self.device)
        self.read_into_(result, name)
        return result

    def read_into_(self, out: Tensor, name: str) -> None:
        value = self.file_of[name].get_tensor(name)
        if value.dtype == torch.float8_e4m3fn and self.config.weight_block_size is not None:
            scale = self.file_of[scale_name(name)].get_tensor(scale_name(name))
            value = dequantise_blocks(value.to(out.device), scale.to(out.device), self.config.weight_block_size)
        out.copy_(value)

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        return LayerWeights(
            input_norm=self.read(prefix + "input_layernorm.weight"),
            post_attention_norm=self.read(prefix + "post_attention_layernorm.weight"),
            attention=self.attention(prefix + "self_attn."),
            indexer=self.indexer(prefix + "self_attn.indexer.") if self.config.is_full(layer) else None,
            ffn=self.moe(prefix + "mlp.") if self.config.is_sparse(layer) else self.dense_ffn(prefix + "mlp."),
        )

    def attention(self, prefix: str) -> AttentionWeights:
        c = self.config
        kv_b = self.read(prefix + "kv_b_proj.weight")
        kv_b = kv_b.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        return AttentionWeights(
            q_a=self.read(prefix + "q_a_proj.weight"),
            q_a_norm=self.read(prefix + "q_a_layernorm.weight"),
            q_b=self.read(prefix + "q_b_proj.weight"),
            kv_a=self.read(prefix + "kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.read(prefix + "kv_a_layernorm.weight"),
            w_uk=kv_b[:, : c.qk_nope_head_dim].contiguous(),
            w_uv=kv_b[:, c.qk_nope_head_dim :].contiguous(),
            o=self.read(prefix + "o_proj.weight"),
        )

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.read(prefix + "wq_b.weight"),
            wk=self.read(prefix + "wk.weight"),
            k_norm_weight=self.read(prefix + "k_norm.weight"),
            k_norm_bias=self.read(prefix + "k_norm.bias"),
            weights_proj=self.read(prefix + "weights_proj.weight", torch.float32),
        )

    def dense_ffn(self, prefix: str) -> DenseFFNWeights:
        return DenseFFNWeights(
            gate_up=self.stack([prefix + "gate_proj.weight", prefix + "up_proj.weight"]).flatten(0, 1),
            down=self.read(prefix + "down_proj.weight"),
        )

    def moe(self, prefix: str) -> MoEWeights:
        experts = [f"{prefix}experts.{expert}." for expert in range(self.config.n_routed_experts)]
        return MoEWeights(
            router=self.read(prefix + "gate.weight", torch.float32),
            bias=self.read(prefix + "gate.e_score_correction_bias", torch.float32),
            gate_up=self.stack([f"{expert}{name}_proj.weight" for expert in experts for name in ("gate", "up")])
            .unflatten(0, (-1, 2))
            .flatten(1, 2),
            down=self.stack([expert + "down_proj.weight" for expert in experts]),
            shared=self.dense_ffn(prefix + "shared_experts."),
        )

    def stack(self, names: Sequence[str]) -> Tensor:
        """Tensors of one shape, stacked. In place, so that the peak is the stack and one of them."""
        stack = torch.empty((len(names), *self.shapes[names[0]]), dtype=self.dtype, device=self.device)
        for out, name in zip(stack, names, strict=True):
            self.read_into_(out, name)
        return stack

    def mtp(self, layer: LayerWeights) -> MTPWeights:
        prefix = f"model.layers.{self.config.num_hidden_layers}."
        return MTPWeights(
            enorm=self.read(prefix + "enorm.weight"),
            hnorm=self.read(prefix + "hnorm.weight"),
            eh_proj=self.read(prefix + "eh_proj.weight"),
            layer=layer,
            norm=self.read(prefix + "shared_head.norm.weight"),
        )


def _faults(
    stored: Mapping[str, tuple[Shape, str]], shapes: Mapping[str, Shape], block: tuple[int, int] | None
) -> list[str]:
    """Where stored shapes and safetensors dtypes differ from what a checkpoint of these shapes may hold."""
    faults = [f"{name} is missing" for name in shapes if name not in stored]
    scales: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name not in stored:
            continue
        found, dtype = stored[name]
        if found != shape:
            faults.append(f"{name} has shape {list(found)}, not {list(shape)}")
        if dtype == "F8_E4M3" and len(shape) == 2:
            scales[scale_name(name)] = scale_shape(shape, block) if block else ()
            if block is None:
                faults.append(f"{name} is F8_E4M3, but config.json gives no weight_block_size")
            elif scale_name(name) not in stored:
                faults.append(f"{name} is F8_E4M3, but {scale_name(name)} is missing")
        elif dtype not in ("F32", "BF16"):
            faults.append(f"{name} has dtype {dtype}, which is not F32, BF16 or, for a matrix, F8_E4M3")
    for name, (found, dtype) in stored.items():
        if name in scales:
            if block is not None and found != scales[name]:
                faults.append(f"{name} has shape {list(found)}, not {list(scales[name])}")
            if dtype != "F32":
                faults.append(f"{name} has dtype {dtype}, not F32")
        elif name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            faults.append(f"{name} is unexpected")
    return faults


def save_checkpoint(path: str | Path, config: GLM53Config, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors of released names into ``path``, which is created."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    description = config.to_dict()
    description["dtype"] = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def random_tensors(config: GLM53Config, *, seed: int, fp8: bool = False) -> dict[str, Tensor]:
    """A checkpoint of random weights whose gains are near one, so that routing and every layer matter.

    fp32 by default; with ``fp8`` the dtypes of the released block-FP8 build, for which the config needs a
    ``weight_block_size``.
    """
    if fp8 and config.weight_block_size is None:
        raise ValueError("fp8=True needs a weight_block_size, the config has None")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            value *= 0.1
        elif len(shape) == 1:
            value = 1 + 0.1 * value
        elif name != "model.embed_tokens.weight":
            value *= shape[-1] ** -0.5
        tensors |= _as_released_fp8(name, value, config.weight_block_size) if fp8 else {name: value}
    return tensors


def _as_released_fp8(name: str, value: Tensor, block: tuple[int, int] | None) -> dict[str, Tensor]:
    if block is not None and is_released_as_fp8(name, value.shape):
        quantised, scale = quantise_blocks(value, block)
        return {name: quantised, scale_name(name): scale}
    keeps_fp32 = name.endswith("e_score_correction_bias")
    return {name: value if keeps_fp32 else value.to(torch.bfloat16)}


def is_released_as_fp8(name: str, shape: Sequence[int]) -> bool:
    """Whether the released block-FP8 build quantises this parameter."""
    return len(shape) == 2 and not name.endswith(_UNQUANTISED)
