"""Reading a checkpoint directory.

FP32, BF16 and block-FP8 checkpoints read alike: a tensor's own dtype decides, since ``modules_to_not_convert`` of the
released config.json names modules that do not exist.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cptools.kernels.block_fp8 import dequantise_blocks, scale_shape

from ..config import GLM53Config
from .model_weights import (
    AttentionWeights,
    DenseFFNWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoEWeights,
    MTPWeights,
)
from .released import Shape, expected_tensors, scale_name


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
