"""What every example under torchrun does first: find its devices, and refuse wrong flags on all ranks alike."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch


def device_type(asked: str | None = None) -> str:
    """ "cpu" or "cuda" for `init_world`: as asked, else CUDA where every local rank has a GPU of its own.

    Raises:
        ValueError: CUDA is asked for and there are fewer GPUs than local ranks, or torchrun did not start this process.
    """
    if "RANK" not in os.environ:
        raise ValueError("start this under torchrun: torchrun --standalone --nproc-per-node R FILE ...")
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and gpus < ranks:
        raise ValueError(f"--device cuda needs a GPU for each of the {ranks} local ranks, there are {gpus}")
    return asked or ("cuda" if gpus >= ranks else "cpu")


def refuse(reason: object) -> NoReturn:
    """End this rank with exit status 2. Call it on all ranks alike.

    The reason goes to stderr and into the report with which torchrun ends, below its own traceback.
    """
    sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: refused: {reason}\n")
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(report).write_text(json.dumps({"message": f"refused: {reason}", "timestamp": int(time.time())}))
    sys.exit(2)


class FlagParser(argparse.ArgumentParser):
    """Refuses wrong flags as the examples refuse everything else."""

    def error(self, message: str) -> NoReturn:
        refuse(message)
