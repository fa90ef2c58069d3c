"""Reading a checkpoint directory, only what a rank keeps of it, straight to its device.

FP32, BF16 and block-FP8 checkpoints read alike: a tensor's own dtype decides, since ``modules_to_not_convert`` of the
released config.json names modules that do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..config import GLM53Config
from ..weight_split import WeightSplit
from .checkpoint_files import ITEM_BYTES, ShardReader, StoredTensor, checkpoint_files, stored_tensors
from .fill import Filling, fill
from .kept_fp8 import check_kept
from .layout import Cut, assemble, check_weight_types
from .model_weights import ModelWeights
from .progress import LoadProgress
from .released import Shape, expected_tensors


def load_weights(
    path: str | Path,
    config: GLM53Config,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    split: WeightSplit | None = None,
    keep_fp8: bool = False,
    progress: LoadProgress | None = None,
) -> ModelWeights:
    """Read what ``split`` leaves this rank of a checkpoint directory: model.safetensors, else the shards of its index,
    else all \\*.safetensors. Local, no communication.

    Matrices and norms come in ``dtype``; router, router bias and ``weights_proj`` in fp32; block-FP8 matrices
    dequantised, or with ``keep_fp8`` as `BlockFP8` where `ModelWeights` may hold one. Files are read once, in their
    own order, each value in one copy to its place on ``device``; host memory beyond the weights stays below 1 GiB.
    progress: called with (bytes read, bytes in all) after each piece, see `progress_bar`.

    Before any tensor is read, ValueError says what cannot be: tensors that are missing, unexpected, misshaped, of a
    dtype that cannot be read, or FP8 without their scale (of each kind the first names and how many); a size that the
    split does not divide; with ``keep_fp8`` the cuts that go through a 128 x 128 block; a dtype that is no float.
    """
    check_weight_types(dtype, keep_fp8)
    split = split or WeightSplit()
    files = checkpoint_files(Path(path))
    shapes = expected_tensors(config)
    stored = stored_tensors(files, shapes, config.weight_block_size)
    kept = {name for name, tensor in stored.items() if keep_fp8 and tensor.dtype == "F8_E4M3"}
    if kept:
        check_kept(config, split, kept, shapes)

    filling = Filling(torch.device(device), dtype, kept)
    weights = assemble(config, split, filling)
    places = sorted(filling.places, key=lambda place: _in_file_order(place[0], stored))
    total = sum(math.prod(cut.shape) * ITEM_BYTES[stored[cut.name].dtype] for cut, _ in places)
    done = 0
    with ShardReader(files, stored) as reader:

        def read(name: str, start: Shape, shape: Shape) -> Tensor:
            nonlocal done
            value = reader.read(name, start, shape)
            if progress is not None and name in shapes:
                done += value.nbytes
                progress(done, total)
            return value

        for cut, into in places:
            fill(cut, into, read, config.weight_block_size)
    return weights


def _in_file_order(cut: Cut, stored: Mapping[str, StoredTensor]) -> tuple[int, int, Shape]:
    tensor = stored[cut.name]
    return tensor.file, tensor.place, cut.start
