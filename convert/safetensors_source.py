"""A folder of safetensors files, read without a second copy in host memory.

The format (huggingface/safetensors, README, "Format"): eight bytes, little endian, with the length of a JSON header;
the header, name -> dtype, shape, data_offsets; then the tensors' bytes, which the offsets cover without holes. Files
are mapped (see `convert.reader`).
"""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.keymap import some
from convert.reader import FileSource
from convert.source import TensorInfo
from dflash_jax.config import read_json
from dflash_jax.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What weights, and the parts of quantised ones, are stored in.
_NUMPY = {
    "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
}  # fmt: skip
# Sizes of every dtype of the format: a file is checked in full even where it holds tensors that are not loaded.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# The reference implementation refuses longer headers too; without a limit a damaged file could ask for any memory.
_MAX_HEADER = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The header of one file and the offset of its data; `UserError` names a file that is cut off or damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise UserError(f"{path}: a Git LFS pointer, not the weights; fetch them with 'git lfs pull'")
            length = int.from_bytes(start[:8], "little")
            if size < 8:
                raise UserError(f"{path}: truncated safetensors file ({size} bytes); fetch it again")
            if length > size - 8:
                raise UserError(
                    f"{path}: truncated safetensors file: a header of {length} bytes in a file of {size}; "
                    "fetch it again"
                )
            if length > _MAX_HEADER:
                raise UserError(f"{path}: not a safetensors file (a header of {length} bytes)")
            file.seek(8)
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise UserError(f"{path}: not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file (its header is not a JSON object)")
    header.pop("__metadata__", None)
    _check_header(path, header, size - 8 - length)
    return header, 8 + length


def _check_header(path: Path, header: dict[str, Any], available: int) -> None:
    """Entries are well formed, agree with their own shape, and cover the data exactly."""

    def counts(value: Any, length: int | None = None) -> bool:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            return False
        return all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)

    for name, entry in header.items():
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("dtype"), str)
            and counts(entry.get("shape"))
            and counts(entry.get("data_offsets"), 2)
        ):
            raise UserError(f"{path}: damaged safetensors header at {name!r}")
        begin, end = entry["data_offsets"]
        bits = _BITS.get(entry["dtype"])
        if begin > end or (bits is not None and math.prod(entry["shape"]) * bits != (end - begin) * 8):
            raise UserError(
                f"{path}: damaged safetensors header: {name!r} ({entry['dtype']} {entry['shape']}) "
                f"has {end - begin} bytes"
            )
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["data_offsets"][0] != position:
            raise UserError(
                f"{path}: damaged safetensors header: {name!r} does not start where the last tensor ends"
            )
        position = entry["data_offsets"][1]
    if position > available:
        raise UserError(
            f"{path}: truncated safetensors file: the header promises {position} bytes of data, "
            f"the file has {available}; fetch it again"
        )
    if position < available:
        raise UserError(
            f"{path}: damaged safetensors file: {available - position} bytes past its last tensor"
        )


def _shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files of a folder, and the index (tensor -> file name) where there is one."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise UserError(f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.exists():
        return [single], None
    if not index.exists():
        raise UserError(f"{folder}: no weights; expected {SINGLE}, {INDEX} or an Orbax checkpoint")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: no 'weight_map' object")
    for name, file in weight_map.items():
        # A name with a folder in it could reach any file of the machine.
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(
                f"{index}: {name!r} is in {file!r}; expected the name of a file in the same folder"
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(files)} files named by {INDEX} are missing: {some(missing)}"
        )
    return [folder / file for file in files], weight_map


class SafetensorsSource(FileSource):
    """A Hugging Face folder: one `model.safetensors`, or shards with an index. Opening it reads headers only."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._where: dict[str, tuple[Path, int, str]] = {}
        tensors: list[TensorInfo] = []
        files, weight_map = _shards(folder)
        owned: dict[str, set[str]] = {}
        for path in files:
            header, data = read_header(path)
            owned[path.name] = set(header)
            for name, entry in header.items():
                # A tensor in two shards stays in the list twice; the key map reports it.
                tensors.append(TensorInfo(name, tuple(entry["shape"]), entry["dtype"]))
                self._where[name] = (path, data + entry["data_offsets"][0], entry["dtype"])
        self.tensors = tuple(tensors)
        lacking = [
            f"{name} in {file}" for name, file in (weight_map or {}).items() if name not in owned[file]
        ]
        if lacking:
            raise UserError(
                f"{folder / INDEX}: {len(lacking)} tensors are not in the shard it names: {some(lacking)}"
            )

    def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        path, offset, dtype = self._where[name]
        if not math.prod(shape):
            return np.zeros(shape, _NUMPY[dtype])
        return np.memmap(path, dtype=_NUMPY[dtype], mode="r", offset=offset, shape=shape)

    def _place_of(self, name: str) -> tuple[Path, int]:
        return self._where[name][:2]
