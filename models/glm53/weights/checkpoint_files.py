"""The safetensors files of a checkpoint directory: which there are, what they hold, and reading parts of it."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cptools.kernels.block_fp8 import scale_shape

from .faults import fault_lines
from .released import Shape, scale_name

INDEX_FILE = "model.safetensors.index.json"
ITEM_BYTES: Mapping[str, int] = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
"""Of the dtypes that can be read, under their safetensors names."""


@dataclass(frozen=True)
class StoredTensor:
    """file, place: the file it is in, by its number, and its place there by offset."""

    file: int
    place: int
    shape: Shape
    dtype: str


def checkpoint_files(path: Path) -> list[Path]:
    """model.safetensors, else the shards of the index, else all \\*.safetensors; ValueError where some are absent."""
    index = path / INDEX_FILE
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
    if not files:
        raise ValueError(f"{path} lacks safetensors files")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} lacks {len(absent)} of {len(files)} files:\n{fault_lines(absent)}")
    return files


def stored_tensors(
    files: Sequence[Path], shapes: Mapping[str, Shape], block: tuple[int, int] | None
) -> dict[str, StoredTensor]:
    """What the headers of the files say.

    One ValueError says what differs from a checkpoint of these shapes: tensors that are missing, unexpected,
    misshaped, of a dtype that cannot be read, FP8 without its scale, or in two files; each kind with its first names
    and how many there are.
    """
    stored: dict[str, StoredTensor] = {}
    copies: Counter[str] = Counter()
    for number, path in enumerate(files):
        with _open(path) as file:
            for place, name in enumerate(file.offset_keys()):
                header = file.get_slice(name)
                stored[name] = StoredTensor(number, place, tuple(header.get_shape()), header.get_dtype())
                copies[name] += 1
    twice = [f"{name} is in {count} files" for name, count in copies.items() if count > 1]
    kinds = [*_faults(stored, shapes, block), twice]
    if any(kinds):
        lines = "\n".join(fault_lines(faults) for faults in kinds if faults)
        raise ValueError(f"the checkpoint does not fit its config.json:\n{lines}")
    return stored


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} can not be read: {error}") from error


def _faults(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, Shape], block: tuple[int, int] | None
) -> list[list[str]]:
    """Missing tensors, those that are not as they should be, unexpected ones."""
    missing = [f"{name} is missing" for name in shapes if name not in stored]
    faults: list[str] = []
    unexpected: list[str] = []
    scales: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name not in stored:
            continue
        found, dtype = stored[name].shape, stored[name].dtype
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
    for name, tensor in stored.items():
        if name in scales:
            if block is not None and tensor.shape != scales[name]:
                faults.append(f"{name} has shape {list(tensor.shape)}, not {list(scales[name])}")
            if tensor.dtype != "F32":
                faults.append(f"{name} has dtype {tensor.dtype}, not F32")
        elif name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            unexpected.append(f"{name} is unexpected")
    return [missing, faults, unexpected]


class ShardReader:
    """Reads rectangles of stored tensors; what it maps of the files at once is bounded.

    A mapped file counts as this process's memory as far as it was touched, until it is unmapped. So a file is opened
    anew after ``window`` bytes. Two files are open at most: a matrix and its scales may stand in two. Close it, or
    use it as a context manager.
    """

    def __init__(self, files: Sequence[Path], stored: Mapping[str, StoredTensor], *, window: int = 256 * 2**20) -> None:
        self._files, self._stored, self._window = files, stored, window
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._touched = 0

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A view into the mapped file: copy it and let it go, for it keeps the file mapped."""
        tensor = self._stored[name]
        # A row that is read in part is touched as a whole, since the system reads ahead.
        self._touched += shape[0] * math.prod(tensor.shape[1:]) * ITEM_BYTES[tensor.dtype]
        if self._touched > self._window:
            self.close()
        if tensor.file not in self._open:
            if len(self._open) == 2:
                self._open.popitem(last=False)
            self._open[tensor.file] = _open(self._files[tensor.file])
        self._open.move_to_end(tensor.file)
        part = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        value: Tensor = self._open[tensor.file].get_slice(name)[part]
        return value

    def close(self) -> None:
        """Unmap all files; reading opens them again."""
        self._open.clear()
        self._touched = 0

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
