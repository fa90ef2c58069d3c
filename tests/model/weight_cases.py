"""Small block-FP8 models and splits for tests of weights, and the memory that loading takes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from models.glm53 import GLM53Config
from models.glm53.weight_split import WeightSplit
from tests.oracle.checkpoints import preset_config

# Every cut of TP 2 on a border of blocks, 16 + 64 rows of kv_a, heads of 112 rows in kv_b.
BLOCKY = replace(
    GLM53Config.glm53().excerpt([2, 3, 4], experts=4, mtp=True),
    vocab_size=128,
    eos_token_ids=(),
    hidden_size=256,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=64,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=16,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_experts_per_tok=2,
    max_position_embeddings=4096,
)
# Cuts and borders inside blocks everywhere.
RAGGED = replace(preset_config("tiny", fp8=True), num_nextn_predict_layers=1)
SPLITS = [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4)]


def ranks(tp: int, ep: int) -> list[WeightSplit]:
    """Of a world of max(tp, ep)."""
    return [WeightSplit(tp, rank % tp, ep, rank % ep) for rank in range(max(tp, ep))]


MEASURE = """
import sys, torch
from models.glm53 import GLM53Config
from models.glm53.weight_split import WeightSplit
from models.glm53.weights import load_weights, weight_bytes

def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

path, ep, keep_fp8 = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "fp8"
config, split = GLM53Config.from_pretrained(path), WeightSplit(ep=ep)
kept = weight_bytes(config, dtype=torch.bfloat16, keep_fp8=keep_fp8, split=split)
torch.zeros(1).to(torch.float8_e4m3fn).float()
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
weights = load_weights(path, config, device="cpu", dtype=torch.bfloat16, split=split, keep_fp8=keep_fp8)
print(kept, memory("VmHWM") - before)
"""


def beyond_the_weights(path: Path, *, ep: int, kind: str) -> tuple[int, int]:
    """(bytes a rank keeps, peak host memory beyond them while it loads), of a process that does nothing else."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(ep), kind],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    kept, peak = map(int, run.stdout.split())
    return kept, peak - kept
