"""A Hugging Face checkpoint folder: config.json beside one or more safetensors files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxvllm.models import registry
from jaxvllm.models.config import ModelConfig, read_hf_config, read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class HFFolder:
    """The tensors and the config of a folder. Files are opened when first asked for, tensors read one by one.

    Raises ValueError naming the file that is missing, truncated or broken.
    """

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def config(self) -> ModelConfig:
        raw = read_json(self.path / "config.json")
        registry.resolve(raw.get("model_type", "missing"))  # before transformers meets what it may not know either
        return read_hf_config(self.path, raw, self._stored_dtype)

    @cached_property
    def _entries(self) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        for file, names in _shards(self.path).items():
            entries = _read_header(file)
            if absent := sorted(names - entries.keys()):
                raise ValueError(f"{file} lacks {absent[0]!r}, which {_INDEX} says it holds.")
            found |= entries
        return found

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, under its stored name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def stored_name(self, hf_name: str) -> str:
        return hf_name

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor, in the dtype of the file, into memory of its own.

        Not through a memory map: its pages would stay beside the copy on the device.
        """
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{entry.file}: {name!r} is {entry.dtype}, which is none of {', '.join(_DTYPES)}.")
        dtype = _DTYPES[entry.dtype]
        values = np.fromfile(entry.file, np.uint8, count=entry.num_bytes, offset=entry.offset)
        if values.nbytes != entry.num_bytes:
            raise ValueError(f"{entry.file} changed while it was read: {name!r} is cut short.")
        return values.view(dtype).reshape(entry.shape)

    def _stored_dtype(self) -> str:
        names = {entry.dtype for entry in self._entries.values() if entry.dtype in _DTYPES}
        return _DTYPES[min(names, key=list(_DTYPES).index)].name if names else "float32"


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Returns the files to read, each with the tensors that the index promises there."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: set()}
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / _INDEX} has no weight_map.")
        shards: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(folder / file, set()).add(name)
        for file in shards:
            if not file.is_file():
                raise ValueError(f"{file} is missing: {_INDEX} names it. Is the download complete?")
        return shards
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return {files[0]: set()}
    if files:
        raise ValueError(f"{folder} holds {len(files)} safetensors files and no {_INDEX} that says what is where.")
    raise ValueError(f"{folder} holds no safetensors file: other formats of weights must be converted first.")


def _read_header(file: Path) -> dict[str, _Entry]:
    """Returns the tensors of one safetensors file, their places checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if start > size:
            raise ValueError(
                f"{file} is truncated or no safetensors file: {size} bytes, but its header ends at {start}."
            )
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, start, info) for name, info in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is broken: its header cannot be read ({error}).") from error
    for name, entry in entries.items():
        if entry.offset + entry.num_bytes > size:
            raise ValueError(
                f"{file} is truncated: {size} bytes, but {name!r} ends at {entry.offset + entry.num_bytes}. "
                "Is the download complete?"
            )
    return entries


def _entry(file: Path, start: int, info: dict[str, Any]) -> _Entry:
    begin, end = info["data_offsets"]
    shape = tuple(int(size) for size in info["shape"])
    dtype = _DTYPES.get(info["dtype"])
    if begin < 0 or end < begin or (dtype and int(np.prod(shape)) * dtype.itemsize != end - begin):
        raise ValueError(f"shape {shape} of {info['dtype']} does not take bytes {begin} to {end}")
    return _Entry(file=file, dtype=info["dtype"], shape=shape, offset=start + begin, num_bytes=end - begin)
