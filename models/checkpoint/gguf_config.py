"""The config of a GGUF file: what its metadata says, and what llama.cpp knows of an architecture without being told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxvllm.models.config import ExpertsConfig, ModelConfig
from jaxvllm.models.rope import RopeConfig, longrope_attention_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How GGUF files hold an architecture. What they have no key for is llama.cpp's own constant, here as there."""

    model_type: str  # Hugging Face's name of the architecture
    permuted: bool = False  # the rows of q and k are in the order of llama.cpp's own rotary kernel
    norm_offset: float = 0.0  # norms are stored with this added to their weights
    hidden_act: str = "silu"
    window_period: int | None = None  # every so many layers one sees everything; None: none does
    no_rope_period: int | None = None  # every so many layers one turns nothing
    local_theta: float | None = None  # of layers with a window
    soft_caps: bool = False
    normalizes_experts: bool = True
    large_num_layers: int | None = None  # the model of so many layers scales by hidden_size / num_heads, not head_dim


_GEMMA = {"norm_offset": 1.0, "hidden_act": "gelu_pytorch_tanh"}
DIALECTS = {  # general.architecture
    "gemma2": Dialect(model_type="gemma2", window_period=2, soft_caps=True, large_num_layers=46, **_GEMMA),
    "gemma3": Dialect(model_type="gemma3_text", window_period=6, local_theta=1e4, large_num_layers=62, **_GEMMA),
    "llama": Dialect(model_type="llama", permuted=True),  # Mistral too; Mixtral where there are experts
    "olmo2": Dialect(model_type="olmo2"),
    "phi3": Dialect(model_type="phi3"),
    "qwen2": Dialect(model_type="qwen2"),
    "qwen2moe": Dialect(model_type="qwen2_moe", normalizes_experts=False),
    "qwen3": Dialect(model_type="qwen3"),
    "qwen3moe": Dialect(model_type="qwen3_moe"),
    "smollm3": Dialect(model_type="smollm3", permuted=True, no_rope_period=4),
}

# Rotary values that files hold as tensors: Llama 3's scaling, Phi-3's longrope.
DIVISORS, SHORT_DIVISORS, LONG_DIVISORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)


class ConfigReader:
    """Reads a config from the metadata, the tensors' shapes and the few tensors that hold rotary values.

    `read` raises ValueError, by name, on what is missing or not supported.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        rope_tensors: Mapping[str, np.ndarray],
        dtype: str,
    ):
        self._metadata = metadata
        self._shapes = shapes
        self._rope_tensors = rope_tensors
        self._dtype = dtype
        self._arch = metadata.get("general.architecture", "")

    def read(self) -> ModelConfig:
        if self._arch not in DIALECTS:
            supported = ", ".join(DIALECTS)
            raise ValueError(
                f"general.architecture={self._arch!r} is not supported: the supported ones are {supported}."
            )
        dialect = DIALECTS[self._arch]
        num_layers, hidden_size = self._value("block_count"), self._value("embedding_length")
        num_heads = self._value("attention.head_count")
        head_dim = self._optional("attention.key_length", hidden_size // num_heads)
        if num_layers > len(self._shapes):
            raise ValueError(f"block_count={num_layers} layers do not fit {len(self._shapes)} tensors.")
        if "token_embd.weight" not in self._shapes:
            raise ValueError("the tensor 'token_embd.weight' is missing.")
        experts = self._experts(dialect)
        windows = self._windows(dialect, num_layers)
        return ModelConfig(
            model_type="mixtral" if dialect.model_type == "llama" and experts else dialect.model_type,
            vocab_size=self._shapes["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=self._value("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._optional("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=self._value("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in self._shapes,
            attention_bias="blk.0.attn_output.bias" in self._shapes,  # a bias on q, k and v alone is the architecture's
            mlp_bias="blk.0.ffn_gate.bias" in self._shapes,
            hidden_act=dialect.hidden_act,
            max_position_embeddings=self._value("context_length"),
            ropes=self._ropes(dialect, windows, head_dim),
            sliding_windows=windows,
            attention_scale=self._optional(
                "attention.scale",
                (hidden_size // num_heads if num_layers == dialect.large_num_layers else head_dim) ** -0.5,
            ),
            attention_soft_cap=self._value("attn_logit_softcapping") if dialect.soft_caps else None,
            logits_soft_cap=(self._value if dialect.soft_caps else self._optional)("final_logit_softcapping"),
            experts=experts,
            sparse_layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in self._shapes for i in range(num_layers)),
            dtype=self._dtype,
            eos_token_ids=frozenset(
                self._metadata[key]
                for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
                if key in self._metadata
            ),
        )

    def _experts(self, dialect: Dialect) -> ExpertsConfig | None:
        if not self._optional("expert_count", 0):
            return None
        shared = self._optional("expert_shared_feed_forward_length")
        return ExpertsConfig(
            num_experts=self._value("expert_count"),
            num_experts_per_token=self._value("expert_used_count"),
            intermediate_size=self._optional("expert_feed_forward_length") or self._value("feed_forward_length"),
            shared_intermediate_size=shared,
            normalize_weights=self._optional("expert_weights_norm", dialect.normalizes_experts),
        )

    def _windows(self, dialect: Dialect, num_layers: int) -> tuple[int | None, ...]:
        window = self._optional("attention.sliding_window") or None  # 0 is none
        period = self._metadata.get(f"{self._arch}.attention.sliding_window_pattern", dialect.window_period)
        if isinstance(period, list):  # one truth per layer
            return tuple(window if slides else None for slides in period)
        return tuple(window if not period or (i + 1) % period else None for i in range(num_layers))

    def _ropes(self, dialect: Dialect, windows: tuple[int | None, ...], head_dim: int) -> tuple[RopeConfig | None, ...]:
        rope = self._rope(dialect, head_dim)
        local_theta = self._optional("rope.freq_base_swa", dialect.local_theta)
        local = rope if local_theta is None else RopeConfig(rope_type="default", theta=local_theta)
        period = dialect.no_rope_period
        return tuple(
            None if period and (i + 1) % period == 0 else rope if window is None else local
            for i, window in enumerate(windows)
        )

    def _rope(self, dialect: Dialect, head_dim: int) -> RopeConfig:
        turned = self._optional("rope.dimension_count", head_dim)
        if turned != head_dim and dialect.permuted:
            raise ValueError(
                f"rope.dimension_count={turned} is not the head size {head_dim}: {self._arch} turns whole heads."
            )
        context = self._value("context_length")
        parameters = {
            "rope_type": self._optional("rope.scaling.type", "none"),
            "rope_theta": self._optional("rope.freq_base", 10000.0),  # the format's own default
            "partial_rotary_factor": turned / head_dim,
            "factor": self._optional("rope.scaling.factor"),
            "original_max_position_embeddings": self._optional("rope.scaling.original_context_length"),
            "beta_fast": self._optional("rope.scaling.yarn_beta_fast"),
            "beta_slow": self._optional("rope.scaling.yarn_beta_slow"),
        }
        if parameters["rope_type"] == "none":
            parameters["rope_type"] = "default"
        if DIVISORS in self._rope_tensors:
            parameters |= {"rope_type": "divisors", "divisors": self._rope_tensors[DIVISORS].tolist()}
        if LONG_DIVISORS in self._rope_tensors and SHORT_DIVISORS in self._rope_tensors:
            original = self._value("rope.scaling.original_context_length")
            parameters |= {
                "rope_type": "longrope",
                "long_factor": self._rope_tensors[LONG_DIVISORS].tolist(),
                "short_factor": self._rope_tensors[SHORT_DIVISORS].tolist(),
                "attention_factor": self._optional(
                    "rope.scaling.attn_factor", longrope_attention_factor(context / original, original)
                ),
            }
        return RopeConfig.from_parameters(parameters, max_position_embeddings=context)

    def _optional(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._arch}.{key}", default)
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise ValueError(f"{self._arch}.{key}={value} differs between layers: that is not supported.")
            return value[0]
        return value

    def _value(self, key: str) -> Any:
        if (value := self._optional(key)) is None:
            raise ValueError(f"the metadata has no {self._arch}.{key}.")
        return value
