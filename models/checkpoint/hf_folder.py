"""A Hugging Face checkpoint folder: config.json beside one or more safetensors files."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxvllm.models import registry
from jaxvllm.models.checkpoint import float8
from jaxvllm.models.config import ModelConfig, read_hf_config, read_json

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")  # what else may lie there: the same weights in another layout
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors names them


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]


class HFFolder:
    """The tensors and the config of a folder. Files are opened when first asked for, tensors read one by one.

    Raises ValueError naming the file that is missing, truncated or broken.
    """

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def config(self) -> ModelConfig:
        raw = read_json(self.path / "config.json")
        registry.resolve(str(raw.get("model_type", "missing")))  # before transformers meets what it may not know either
        return read_hf_config(self.path, raw, self._stored_dtype)

    @cached_property
    def _entries(self) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        shards = _shards(self.path)
        for file in sorted(set(self.path.glob("*.safetensors")) - shards.keys()):
            if _SHARD.fullmatch(file.name):
                raise ValueError(
                    f"{file} is a shard that {_INDEX} does not name: one of them is of another version of the model. "
                    "Delete the file, or fetch the folder again."
                )
            logger.warning("%s is not read: %s names the files of the model, and not this one.", file, _INDEX)
        for file, names in shards.items():
            entries = _read_header(file)
            if absent := sorted(names - entries.keys()):
                raise ValueError(f"{file} lacks {absent[0]!r}, which {_INDEX} says it holds.")
            found |= entries
        return found

    @property
    def has_weights(self) -> bool:
        """Whether there is anything but a config."""
        return any(self.path.glob("*.safetensors")) or (self.path / _INDEX).exists()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, under its stored name; what scales a float8 weight belongs to it."""
        scaling = {scale for name in self._entries for scale in self._scales(name)}
        return {name: entry.shape for name, entry in self._entries.items() if name not in scaling}

    def stored_name(self, hf_name: str) -> str:
        return hf_name

    def read(self, name: str, dtype: str | None = None) -> np.ndarray:
        """Reads one tensor, in the dtype of the file, into memory of its own; float8 is dequantised, to `dtype`."""
        entry = self._entries[name]
        if entry.dtype in float8.DTYPES:
            return self._read_float8(name, np.dtype(dtype or "float32"))
        if entry.dtype not in _DTYPES:
            known = ", ".join((*_DTYPES, *float8.DTYPES))
            raise ValueError(f"{entry.file}: {name!r} is {entry.dtype}, which is none of {known}.")
        return self._read_as_stored(name)

    def _read_as_stored(self, name: str) -> np.ndarray:
        file = self._entries[name].file
        try:
            # Opened for each tensor: the pages of an open file would stay in memory beside the copy on the device.
            with safe_open(file, framework="numpy") as content:
                return content.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} changed while it was read: {error}.") from error

    def _read_float8(self, name: str, dtype: np.dtype) -> np.ndarray:
        at = f"{self._entries[name].file}: {name!r} is {self._entries[name].dtype}"
        if (quantization := read_json(self.path / "config.json").get("quantization_config")) is None:
            raise ValueError(f"{at}, and config.json has no quantization_config that says how it is scaled.")
        scales = [scale for scale in self._scales(name) if scale.startswith(f"{name}_")]
        if not scales:
            raise ValueError(f"{at} and has no scale: {' or '.join(name + end for end in float8.SCALE_SUFFIXES)}.")
        try:
            scheme = float8.read_float8(quantization)
            return float8.dequantize(self._read_bytes(name), self._read_as_stored(scales[0]), scheme, dtype)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error

    def _read_bytes(self, name: str) -> np.ndarray:
        """Reads a float8 tensor, which the library knows but cannot give to numpy."""
        entry = self._entries[name]
        with entry.file.open("rb") as content:
            header_size = int.from_bytes(content.read(8), "little")
            begin, end = json.loads(content.read(header_size))[name]["data_offsets"]  # which the library has checked
            content.seek(8 + header_size + begin)
            values = np.fromfile(content, np.uint8, end - begin)
        return values.view(float8.DTYPES[entry.dtype]).reshape(entry.shape)

    def _scales(self, name: str) -> list[str]:
        """Returns the tensors that scale a float8 weight, and its input, which stays as it is here."""
        if self._entries[name].dtype not in float8.DTYPES:
            return []
        of_input = (name.rpartition(".")[0] + end for end in (".input_scale", ".activation_scale"))
        scales = (*(name + end for end in float8.SCALE_SUFFIXES), *of_input)
        return [scale for scale in scales if scale in self._entries]

    def _stored_dtype(self) -> str:
        names = {entry.dtype for entry in self._entries.values() if entry.dtype in _DTYPES}
        return _DTYPES[min(names, key=list(_DTYPES).index)] if names else "float32"


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Returns the files to read, each with the tensors that the index promises there."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: set()}
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(_is_file_name(f) for f in weight_map.values()):
            raise ValueError(f"{folder / _INDEX} has no weight_map from tensors to files.")
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


def _is_file_name(value: object) -> bool:
    """Whether an index names a file of its own folder."""
    return isinstance(value, str) and Path(value).name == value


def _read_header(file: Path) -> dict[str, _Entry]:
    """Returns the tensors of one safetensors file; the library checks their places against the file's size."""
    try:
        with safe_open(file, framework="numpy") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # it is no mapping
            return {
                name: _Entry(file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is truncated or broken ({error}). Is the download complete?") from error
