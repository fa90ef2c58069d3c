"""A small GLM-5.3 with random weights, and a long real text for it: bytes of Python's own standard library.

    python examples/demo_model.py DIR [--mtp]

writes the checkpoint: config.json and model.safetensors, under the names of the released one.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.glm53 import GLM53Config
from models.glm53.weights import random_tensors, save_checkpoint

BEGIN = 256
"""The one token that is no byte: it opens the prompt."""

CONFIG = GLM53Config(
    vocab_size=257,
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=256,
    indexer_types=("full", "full", "shared", "shared", "shared", "full", "shared", "shared"),
    mlp_layer_types=("dense",) * 2 + ("sparse",) * 6,
    intermediate_size=256,
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    rms_norm_eps=1e-5,
    rope_theta=8e6,
    max_position_embeddings=131_072,
)
"""Every kind of layer of GLM-5.3 in eight: dense or mixture, with its own indexer or sharing an earlier one."""


def save_demo_checkpoint(path: Path, *, mtp: bool = False, seed: int = 0) -> None:
    """config.json and model.safetensors of `CONFIG` with random weights; with ``mtp`` an MTP layer."""
    config = replace(CONFIG, num_nextn_predict_layers=1, index_share_for_mtp_iteration=True) if mtp else CONFIG
    save_checkpoint(path, config, random_tensors(config, seed=seed))


def standard_library_prompt(tokens: int) -> list[int]:
    """`BEGIN` and the first bytes of the sources of the standard library, sorted by name.

    Raises:
        ValueError: the library is shorter than that.
    """
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= tokens:
            break
        text += file.read_bytes()
    if len(text) + 1 < tokens or tokens < 1:
        raise ValueError(
            f"tokens={tokens} must be in [1, {len(text) + 1}], the length of the standard library's sources"
        )
    return [BEGIN, *text[: tokens - 1]]


def as_text(ids: list[int]) -> str:
    """Generated ids as the bytes they stand for, quoted."""
    return repr(bytes(token for token in ids if token < BEGIN))[1:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a small GLM-5.3 checkpoint with random weights.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--mtp", action="store_true", help="with the multi-token-prediction layer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        save_demo_checkpoint(args.folder, mtp=args.mtp, seed=args.seed)
    except OSError as error:
        parser.error(str(error))
    print(f"{args.folder}: {CONFIG.num_hidden_layers} layers{' and an MTP layer' if args.mtp else ''}, random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
