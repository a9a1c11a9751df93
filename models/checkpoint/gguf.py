"""A GGUF file: its metadata, its tensors under Hugging Face's names and in Hugging Face's order of rows."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from jaxvllm.models.checkpoint.gguf_config import DIALECTS, ROPE_TENSORS, ConfigReader
from jaxvllm.models.config import ModelConfig

_MAX_ITEMS = 2**22  # of a list in the metadata: ten times the merges of the largest vocabulary
_ONE_ROW = ".ffn_gate_inp_shexp.weight"  # a matrix of one row, stored as a vector


class GGUFFile:
    """The metadata, the config and the tensors of a GGUF file; the header alone is read until `read` is called.

    `metadata` holds every key with its value as int, float, bool, str or a list of these. Raises ValueError naming
    the file when it is no GGUF file, truncated, or of a kind that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        reader = _open(path)
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        self.metadata = {name: _value(field) for name, field in fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @cached_property
    def config(self) -> ModelConfig:
        try:
            shapes = {name: self._shape(name) for name in self._tensors}
            rope_tensors = {name: self._dequantized(name) for name in ROPE_TENSORS if name in self._tensors}
            return ConfigReader(self.metadata, shapes, rope_tensors, self._dtype()).read()
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{self.path}: {error}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that stands for a weight, under its stored name."""
        return {name: self._shape(name) for name in self._tensors if name not in ROPE_TENSORS}

    def stored_name(self, hf_name: str) -> str:
        """Returns the name a Hugging Face tensor has in the file."""
        return self._names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor: dequantised to float32, as Hugging Face has it."""
        values, dialect = self._dequantized(name), DIALECTS[self._arch]
        if dialect.permuted and (num_heads := self._permuted_heads(name)):
            values = unpermute(values, num_heads)
        if dialect.norm_offset and name.endswith("norm.weight"):
            values -= np.float32(dialect.norm_offset)
        return values

    def _dequantized(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: {name!r} is {kind}, which gguf cannot dequantise.") from error
        if np.may_share_memory(values, tensor.data):
            values = np.array(values)  # a copy: the file's own memory map must not be kept
        return values.reshape(self._shape(name))

    @property
    def _arch(self) -> str:
        return self.metadata.get("general.architecture", "")

    @cached_property
    def _names(self) -> gguf.TensorNameMap:
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch)
        return gguf.get_tensor_name_map(arch, self.config.num_layers)

    def _permuted_heads(self, name: str) -> int | None:
        """Returns the heads of a permuted tensor; None for every other tensor."""
        if name.endswith((".attn_q.weight", ".attn_q.bias")):
            return self.config.num_heads
        if name.endswith((".attn_k.weight", ".attn_k.bias")):
            return self.config.num_kv_heads
        return None

    def _dtype(self) -> str:
        """Returns what the matrices are stored in; bfloat16 for what is quantised."""
        kinds = {tensor.tensor_type for tensor in self._tensors.values() if len(tensor.shape) > 1}
        if kinds == {GGMLQuantizationType.F32}:
            return "float32"
        return "float16" if kinds <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32} else "bfloat16"

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(reversed(self._tensors[name].shape.tolist()))  # GGUF writes the innermost axis first
        return (1, *shape) if name.endswith(_ONE_ROW) and len(shape) == 1 else shape


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Brings rows stored in rotary pairs, (0, H/2, 1, H/2+1, ...) of each head, back into the order (0, 1, ...)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


class _Reader(GGUFReader):
    """gguf's reader, quicker and bounded.

    It slices its file a million times for a large vocabulary: of a plain array, not a memmap, that takes a third of
    the time. And a damaged length, which would keep it busy for hours, is an error.
    """

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, file: np.ndarray):
        self._plain = file.view(np.ndarray)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"{count} numbers at byte {offset} go past its end")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            length = int(self._get(orig_offs + 4, np.uint64)[0])  # behind the kind of its items
            if length > _MAX_ITEMS:
                raise ValueError(f"a list of {length} entries in its metadata")
        return super()._get_field_parts(orig_offs, raw_type)


def _open(path: Path) -> GGUFReader:
    """Opens a file with gguf's reader, which takes seconds for a large vocabulary: open a file once."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
    try:
        return _Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is truncated, broken or of an unknown kind ({error}).") from error


def _value(field: ReaderField) -> Any:
    """Returns a value of the metadata: int, float, bool, str, or a list of these."""
    if field.types[-1] != GGUFValueType.STRING:
        return field.contents()
    # Some vocabularies hold pieces of characters, which gguf's own conversion to text refuses.
    texts = [bytes(field.parts[i]).decode("utf-8", errors="surrogateescape") for i in field.data]
    return texts if field.types[0] == GGUFValueType.ARRAY else texts[0]
