"""What every example does first: find its ranks and devices, and refuse wrong flags on all ranks alike."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from cptools import ParallelConfig
from models.glm53 import GLM53Config

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def join_torchrun() -> None:
    """A process that torchrun did not start is a world of one rank: describe it as torchrun would."""
    if "RANK" not in os.environ:
        # Port 0: whichever is free, since nobody else has to know it.
        os.environ.update({**ALONE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})


def device_type(asked: str | None = None) -> str:
    """ "cpu" or "cuda" for `init_world`: as asked, else CUDA where every local rank has a GPU of its own.

    Raises:
        ValueError: CUDA is asked for and there are fewer GPUs than local ranks.
    """
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and gpus < ranks:
        raise ValueError(f"--device cuda needs a GPU for each of the {ranks} local ranks, there are {gpus}")
    return asked or ("cuda" if gpus >= ranks else "cpu")


def check_world(sizes: ParallelConfig) -> None:
    """ValueError unless there are as many ranks as these sizes make."""
    if sizes.world_size != int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"{sizes} needs {sizes.world_size} ranks, there are {os.environ['WORLD_SIZE']}: "
            f"start it with torchrun --standalone --nproc-per-node {sizes.world_size} FILE ..."
        )


def check_draft_tokens(draft_tokens: int, config: GLM53Config) -> None:
    """ValueError where a checkpoint has no MTP layer to make them."""
    if draft_tokens and not config.num_nextn_predict_layers:
        raise ValueError(f"--draft-tokens {draft_tokens} needs an MTP layer, the checkpoint has none")


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

    def require(self, args: argparse.Namespace, *, positive: Sequence[str], or_zero: Sequence[str]) -> None:
        """Refuse the first of these flags, by their names in ``args``, that is not finite and positive, or zero."""
        for name in (*positive, *or_zero):
            value = getattr(args, name)
            if value is not None and not (0 <= value < math.inf and (value or name in or_zero)):
                self.error(f"--{name.replace('_', '-')} {value} must be positive{' or zero' * (name in or_zero)}")
