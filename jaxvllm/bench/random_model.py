"""Models with random weights, for measurements without a checkpoint: a step costs the same whatever the weights."""

import json
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxvllm.models import registry
from jaxvllm.models.checkpoint.weight_map import find_sources
from jaxvllm.models.config import ModelConfig, read_hf_config

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "dtype": "float32",
}


def _llama(vocab: int, hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, head: int) -> dict:
    return _LLAMA | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _llama(512, 64, 160, 2, 4, 2, 16),
    "small": _llama(8192, 384, 1024, 6, 6, 2, 64),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, 64),
    "qwen3-0.6b-shaped": _llama(151936, 1024, 3072, 28, 16, 8, 128),  # without Qwen3's norms on q and k
}


class RandomCheckpoint:
    """As a checkpoint file, but every tensor is drawn when it is read; the same ones each time."""

    def __init__(self, name_or_path: str):
        """A name of `CONFIGS`, or a config.json. Raises ValueError where it is neither."""
        self.path = Path(name_or_path)
        if name_or_path in CONFIGS:
            self._raw = CONFIGS[name_or_path]
        elif self.path.is_file():
            self._raw = json.loads(self.path.read_text(encoding="utf-8"))
        else:
            raise ValueError(f"--random={name_or_path} is none of {', '.join(CONFIGS)}, and no config.json either.")

    @cached_property
    def config(self) -> ModelConfig:
        registry.resolve(str(self._raw.get("model_type", "missing")))
        with TemporaryDirectory() as folder:  # transformers reads configs from folders only
            (Path(folder) / "config.json").write_text(json.dumps(self._raw), encoding="utf-8")
            return read_hf_config(Path(folder), self._raw, lambda: "float32")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        architecture = registry.resolve(self.config.model_type)
        _, state = nnx.split(nnx.eval_shape(lambda: architecture.make(self.config)))
        shapes = {".".join(map(str, keys)): leaf.shape for keys, leaf in nnx.to_flat_state(state)}
        sources = find_sources(shapes, architecture.weights, stored={})
        return {name: shape for source in sources for name, shape in source.stored_shapes(shapes).items()}

    def stored_name(self, hf_name: str) -> str:
        return hf_name

    def read(self, name: str) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        shape = self.shapes[name]
        if "norm" in name:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1], dtype=np.float32)


def num_parameters(params: Any) -> int:
    """Weights of a model, each once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
