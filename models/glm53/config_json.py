"""Reading a released config.json: which keys make up a GLM53Config, and which must hold for it to mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
# The one value of each switch that this model implements; a config.json may leave any of them out.
IMPLEMENTED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
}
IMPLEMENTED_QUANTIZATION: Mapping[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")


class ConfigReader:
    """Takes the constructor's arguments out of a config.json.

    What is wrong goes to ``problems`` and stays out of ``values``, so that one error can name all of it.
    """

    def __init__(self, source: Mapping[str, object]) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def take(self, name: str, kind: type, *, optional: bool = False) -> None:
        if optional and self.source.get(name) is None:
            return
        value = self._typed(self.source, name, kind)
        if value is not None:
            self.values[name] = value

    def take_rope_theta(self) -> None:
        theta: dict[str, object] = {"rope_theta": self.source.get("rope_theta")}
        for key in ("rope_scaling", "rope_parameters"):  # the older and the newer name
            rope = self.source.get(key)
            if isinstance(rope, Mapping):
                theta |= rope
                kind = rope.get("rope_type", rope.get("type", "default"))
                if kind != "default" or rope.get("type", "default") != "default":
                    self.problems.append(f"rope type {kind!r} is not implemented (only 'default')")
                for name in rope.keys() - {"rope_type", "type", "rope_theta"}:
                    neutral = name == "partial_rotary_factor" and rope[name] == 1
                    if rope[name] is not None and not neutral:
                        self.problems.append(f"{key}.{name}={rope[name]!r} is not implemented")
            elif rope is not None:
                self.problems.append(f"{key}={rope!r} is not an object")
        value = self._typed(theta, "rope_theta", float)
        if value is not None:
            self.values["rope_theta"] = value

    def take_indexer_types(self) -> None:
        types = self.source.get("indexer_types")
        pattern = self.source.get("index_topk_pattern")
        layers = self.values.get("num_hidden_layers")
        if types is not None:
            self._take_names("indexer_types", types)
        elif pattern is not None:
            if isinstance(pattern, str) and set(pattern) <= {"F", "S"}:
                self.values["indexer_types"] = tuple({"F": "full", "S": "shared"}[letter] for letter in pattern)
            else:
                self.problems.append(f"index_topk_pattern={pattern!r} is not a string of F and S")
        else:
            freq = self._typed(self.source, "index_topk_freq", int, 1)
            offset = self._typed(self.source, "index_skip_topk_offset", int, 2)
            if freq is not None and freq < 1:
                self.problems.append(f"index_topk_freq={freq} is not positive")
            elif freq is not None and offset is not None and layers is not None:
                self.values["indexer_types"] = scheduled_indexer_types(layers, freq=freq, offset=offset)

    def take_mlp_layer_types(self) -> None:
        types = self.source.get("mlp_layer_types")
        layers = self.values.get("num_hidden_layers")
        if types is not None:
            self._take_names("mlp_layer_types", types)
            return
        first = self._typed(self.source, "first_k_dense_replace", int)
        freq = self._typed(self.source, "moe_layer_freq", int, 1)
        if freq is not None and freq < 1:
            self.problems.append(f"moe_layer_freq={freq} is not positive")
        elif first is not None and freq is not None and layers is not None:
            self.values["mlp_layer_types"] = scheduled_mlp_layer_types(layers, first_k_dense=first, freq=freq)

    def take_eos_token_ids(self) -> None:
        value = self.source.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if all(type(token) is int for token in ids):
            self.values["eos_token_ids"] = tuple(ids)
        else:
            self.problems.append(f"eos_token_id={value!r} is neither a token id nor a list of them")

    def take_weight_block_size(self) -> None:
        quantization = self.source.get("quantization_config")
        if quantization is None:
            return
        if not isinstance(quantization, Mapping):
            self.problems.append(f"quantization_config={quantization!r} is not an object")
            return
        self._check_values(quantization, IMPLEMENTED_QUANTIZATION, "quantization_config.")
        if quantization.get("quant_method") is None:
            self.problems.append("quantization_config.quant_method is missing")
        block = quantization.get("weight_block_size")
        if isinstance(block, list | tuple) and len(block) == 2 and all(type(side) is int for side in block):
            self.values["weight_block_size"] = tuple(block)
        else:
            self.problems.append(f"quantization_config.weight_block_size={block!r} is not a pair of block sizes")

    def check_switches(self) -> None:
        """What the constructor does not take, yet must hold for its reading of the file to be right."""
        model_type = self.source.get("model_type")
        if model_type != "glm_moe_dsa":
            self.problems.append(f"model_type={model_type!r} is not 'glm_moe_dsa'")
        self._check_values(self.source, IMPLEMENTED, "")
        implied: dict[str, object] = {}
        if "num_attention_heads" in self.values:
            implied["num_key_value_heads"] = self.values["num_attention_heads"]
        if {"qk_nope_head_dim", "qk_rope_head_dim"} <= self.values.keys():
            implied["qk_head_dim"] = self.values["qk_nope_head_dim"] + self.values["qk_rope_head_dim"]
        self._check_values(self.source, implied, "")
        types = self.source.get("layer_types")
        if types is not None and not (isinstance(types, list | tuple) and all(kind in _LAYER_TYPES for kind in types)):
            self.problems.append(f"layer_types={types!r} holds other layers than {', '.join(_LAYER_TYPES)}")

    def _typed(self, source: Mapping[str, object], name: str, kind: type, default: object = None) -> Any:
        value = source.get(name)
        if value is None:
            value = default
        if value is None:
            self.problems.append(f"{name} is missing")
            return None
        if kind is float and type(value) is int:
            value = float(value)
        # Not isinstance: True is an int, and "num_hidden_layers": true is a mistake.
        if type(value) is not kind:
            self.problems.append(f"{name}={value!r} is not of type {kind.__name__}")
            return None
        return value

    def _take_names(self, name: str, value: object) -> None:
        if isinstance(value, list | tuple):
            self.values[name] = tuple(value)
        else:
            self.problems.append(f"{name}={value!r} is not a list")

    def _check_values(self, source: Mapping[str, object], wanted: Mapping[str, object], prefix: str) -> None:
        for key, want in wanted.items():
            value = source.get(key)
            if value is not None and value != want:
                self.problems.append(f"{prefix}{key}={value!r} is not implemented (only {want!r})")


def scheduled_indexer_types(layers: int, *, freq: int, offset: int) -> tuple[str, ...]:
    return tuple("full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers))


def scheduled_mlp_layer_types(layers: int, *, first_k_dense: int, freq: int) -> tuple[str, ...]:
    return tuple("sparse" if layer >= first_k_dense and layer % freq == 0 else "dense" for layer in range(layers))
