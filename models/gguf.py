"""A GGUF file: its metadata, its tensors under Hugging Face's names and in Hugging Face's order of rows."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from jaxvllm.models.config import ModelConfig
from jaxvllm.models.rope import RopeConfig

_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3"}  # general.architecture: Hugging Face's model_type
_PERMUTED = ("llama",)  # architectures whose q and k rows llama.cpp reorders for its own rotary kernel
_ROPE_DIVISORS = "rope_freqs.weight"  # holds Llama 3's rotary scaling, which the metadata does not name


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
            return self._read_config()
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{self.path}: {error}") from error

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that stands for a weight, under its stored name."""
        return {name: self._shape(name) for name in self._tensors if name != _ROPE_DIVISORS}

    def stored_name(self, hf_name: str) -> str:
        """Returns the name a Hugging Face tensor has in the file."""
        return self._names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor: dequantised to float32, rows in Hugging Face's order."""
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: {name!r} is {kind}, which gguf cannot dequantise.") from error
        values = np.array(values).reshape(self._shape(name))  # a copy: the file's own memory map must not be kept
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
        if num_layers > len(self._tensors):
            raise ValueError(f"block_count={num_layers} layers do not fit {len(self._tensors)} tensors.")
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
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            max_position_embeddings=self._value("context_length"),
            hidden_act="silu",
            ropes=(self._read_rope(),) * num_layers,
            sliding_windows=(None,) * num_layers,
            attention_scale=head_dim**-0.5,
            attention_soft_cap=None,
            logits_soft_cap=None,
            experts=None,
            sparse_layers=(False,) * num_layers,
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
        if _ROPE_DIVISORS in self._tensors:
            return RopeConfig(rope_type="divisors", theta=theta, divisors=tuple(self.read(_ROPE_DIVISORS).tolist()))
        if kind == "none":
            return RopeConfig(rope_type="default", theta=theta)
        return RopeConfig(rope_type=kind, theta=theta, factor=self._optional("rope.scaling.factor", None))

    def _dtype(self) -> str:
        """Returns what the matrices are stored in; bfloat16 for what is quantised."""
        kinds = {tensor.tensor_type for tensor in self._tensors.values() if len(tensor.shape) > 1}
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
        if name not in self._tensors:
            raise ValueError(f"the tensor {name!r} is missing.")
        return tuple(reversed(self._tensors[name].shape.tolist()))  # GGUF writes the innermost axis first


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Brings rows stored in rotary pairs, (0, H/2, 1, H/2+1, ...) of each head, back into the order (0, 1, ...)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _open(path: Path) -> GGUFReader:
    """Opens a file with gguf's reader, which takes seconds for a large vocabulary: open a file once."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is truncated, broken or of an unknown kind ({error}).") from error


def _value(field: ReaderField) -> Any:
    """Returns a value of the metadata: int, float, bool, str, or a list of these."""
    if field.types[-1] != GGUFValueType.STRING:
        return field.contents()
    # Some vocabularies hold pieces of characters, which gguf's own conversion to text refuses.
    texts = [bytes(field.parts[i]).decode("utf-8", errors="surrogateescape") for i in field.data]
    return texts if field.types[0] == GGUFValueType.ARRAY else texts[0]
