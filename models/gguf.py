"""A GGUF file: its metadata, its tensors under Hugging Face's names and in Hugging Face's order of rows."""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from jaxvllm.models.config import ModelConfig
from jaxvllm.models.rope import RopeConfig

_VERSIONS = (2, 3)
_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3"}  # general.architecture: Hugging Face's model_type
_PERMUTED = ("llama",)  # architectures whose q and k rows llama.cpp reorders for its own rotary kernel
_ROPE_DIVISORS = "rope_freqs.weight"  # holds Llama 3's rotary scaling, which the metadata does not name
_SCALARS = {  # how struct reads a value
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Where one tensor lies."""

    shape: tuple[int, ...]  # outermost axis first, as numpy has it; GGUF writes it the other way round
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """The metadata, the config and the tensors of a GGUF file; the header alone is read until `read` is called.

    `metadata` holds every key with its value as int, float, bool, str or a list of these. Raises ValueError naming
    the file when it is no GGUF file, truncated, or of a kind that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        # Not gguf's own reader: it makes several numpy arrays for each entry of the vocabulary, which takes seconds.
        self.metadata, self._entries = _read_header(path)

    @cached_property
    def config(self) -> ModelConfig:
        try:
            return self._read_config()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that stands for a weight, under its stored name."""
        return {name: entry.shape for name, entry in self._entries.items() if name != _ROPE_DIVISORS}

    def stored_name(self, hf_name: str) -> str:
        """Returns the name a Hugging Face tensor has in the file."""
        return self._names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor: dequantised to float32, rows in Hugging Face's order."""
        entry = self._entries[name]
        raw = np.fromfile(self.path, np.uint8, count=entry.num_bytes, offset=entry.offset)
        if entry.kind == GGMLQuantizationType.F32:
            values = raw.view(np.float32)
        elif entry.kind == GGMLQuantizationType.F16:
            values = raw.view(np.float16)
        else:
            try:
                values = gguf.dequantize(raw.reshape(*entry.shape[:-1], -1), entry.kind)
            except NotImplementedError as error:
                raise ValueError(
                    f"{self.path}: {name!r} is {entry.kind.name}, which gguf cannot dequantise."
                ) from error
        values = values.reshape(entry.shape)
        if self._arch in _PERMUTED and (num_heads := self._permuted_heads(name)):
            values = unpermute(values, num_heads)
        return values

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

    def _read_config(self) -> ModelConfig:
        if self._arch not in _MODEL_TYPES:
            supported = ", ".join(_MODEL_TYPES)
            raise ValueError(
                f"general.architecture={self._arch!r} is not supported: the supported ones are {supported}."
            )
        if self._optional("expert_count", 0):
            raise ValueError("a mixture of experts is not supported in GGUF files.")
        num_heads, hidden_size = self._value("attention.head_count"), self._value("embedding_length")
        head_dim = self._optional("attention.key_length", hidden_size // num_heads)
        if (turned := self._optional("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"rope.dimension_count={turned} is not the head size {head_dim}: that is not supported.")
        num_layers = self._value("block_count")
        return ModelConfig(
            model_type=_MODEL_TYPES[self._arch],
            vocab_size=self._shape("token_embd.weight")[0],
            hidden_size=hidden_size,
            intermediate_size=self._value("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._optional("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=self._value("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in self._entries,
            attention_bias="blk.0.attn_q.bias" in self._entries,
            mlp_bias="blk.0.ffn_gate.bias" in self._entries,
            max_position_embeddings=self._value("context_length"),
            rope=self._read_rope(),
            sliding_windows=(None,) * num_layers,
            dtype=self._dtype(),
            eos_token_ids=frozenset(
                self.metadata[key]
                for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
                if key in self.metadata
            ),
        )

    def _read_rope(self) -> RopeConfig:
        kind = self._optional("rope.scaling.type", "none")
        theta = self._optional("rope.freq_base", 10000.0)  # the format's own default
        if _ROPE_DIVISORS in self._entries:
            return RopeConfig(rope_type="divisors", theta=theta, divisors=tuple(self.read(_ROPE_DIVISORS).tolist()))
        if kind == "none":
            return RopeConfig(rope_type="default", theta=theta)
        return RopeConfig(rope_type=kind, theta=theta, factor=self._optional("rope.scaling.factor", None))

    def _dtype(self) -> str:
        """Returns what the matrices are stored in; bfloat16 for what is quantised."""
        kinds = {entry.kind for entry in self._entries.values() if len(entry.shape) > 1}
        if kinds == {GGMLQuantizationType.F32}:
            return "float32"
        return "float16" if kinds <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32} else "bfloat16"

    def _optional(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self._arch}.{key}", default)
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise ValueError(f"{self._arch}.{key}={value} differs between layers: that is not supported.")
            return value[0]
        return value

    def _value(self, key: str) -> Any:
        if (value := self._optional(key, None)) is None:
            raise ValueError(f"the metadata has no {self._arch}.{key}.")
        return value

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            raise ValueError(f"the tensor {name!r} is missing.")
        return self._entries[name].shape


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Brings rows stored in rotary pairs, (0, H/2, 1, H/2+1, ...) of each head, back into the order (0, 1, ...)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


class _Cursor:
    """Reads values one after the other; struct refuses to read past the end."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        length = self.take("Q")
        # Some vocabularies hold pieces of characters: the bytes that are no UTF-8 must not stop the reading.
        return self.take(f"{length}s").decode("utf-8", errors="surrogateescape")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.take(_SCALARS[kind])
        kind, count = GGUFValueType(self.take("I")), self.take("Q")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind]}"
            values = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return values
        return [self.value(kind) for _ in range(count)]

    def tensor(self) -> tuple[str, _Entry]:
        """Reads a tensor's name and place, the offset still from the start of the data."""
        name = self.text()
        shape = tuple(reversed([self.take("Q") for _ in range(self.take("I"))]))
        number = self.take("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ValueError(f"{name!r} has the unknown quantisation type {number}.") from error
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_elements = int(np.prod(shape, dtype=np.int64))
        if shape and shape[-1] % block_size:
            raise ValueError(f"{name!r} has rows of {shape[-1]}, no multiple of the {block_size} of {kind.name}.")
        num_bytes = num_elements // block_size * block_bytes
        return name, _Entry(shape=shape, kind=kind, offset=self.take("Q"), num_bytes=num_bytes)


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
    """Returns the metadata and the tensors' places, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, entries = _parse(_Cursor(data))
        except (struct.error, OverflowError, MemoryError) as error:
            raise ValueError(f"{path} is truncated or broken: its header runs past its {size} bytes.") from error
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from error
    for name, entry in entries.items():
        if entry.offset + entry.num_bytes > size:
            raise ValueError(
                f"{path} is truncated: {size} bytes, but {name!r} ends at {entry.offset + entry.num_bytes}. "
                "Is the download complete?"
            )
    return metadata, entries


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _Entry]]:
    cursor.take("I")  # the magic, already seen
    if (version := cursor.take("I")) not in _VERSIONS:
        raise ValueError(f"GGUF version {version} is none of {_VERSIONS}; a huge one means a big-endian file.")
    num_tensors, num_keys = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value(GGUFValueType(cursor.take("I")))
    entries = dict(cursor.tensor() for _ in range(num_tensors))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: _Entry(shape=e.shape, kind=e.kind, offset=start + e.offset, num_bytes=e.num_bytes)
        for name, e in entries.items()
    }
