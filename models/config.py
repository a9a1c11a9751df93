"""What a model is: the values its checkpoint decides, under our names."""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxvllm.models.checkpoint.float8 import read_float8
from jaxvllm.models.rope import RopeConfig

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts of a checkpoint. Hashable; raises ValueError where values contradict."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of each expert
    shared_intermediate_size: int | None  # of the expert that every token goes through; None: there is none
    normalize_weights: bool  # whether the weights of a token's experts are made to sum to 1

    def __post_init__(self):
        for name in ("num_experts", "num_experts_per_token", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of the experts is not a positive number.")
        if self.shared_intermediate_size is not None and self.shared_intermediate_size < 1:
            raise ValueError(f"shared_intermediate_size={self.shared_intermediate_size} is not a positive number.")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(f"{self.num_experts_per_token} experts per token of {self.num_experts} there are not.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of a checkpoint. No value has a default here: each comes from the checkpoint.

    Hashable, so that it can stand in a compiled step's static part. Raises ValueError where values contradict.
    """

    model_type: str  # Hugging Face's name of the architecture
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's ids
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str  # of the feed-forward layers
    max_position_embeddings: int  # tokens per sequence the model was made for
    ropes: tuple[RopeConfig | None, ...]  # per layer; None turns nothing
    sliding_windows: tuple[int | None, ...]  # per layer, tokens; None sees everything before
    attention_scale: float  # of the products of queries and keys
    attention_soft_cap: float | None  # of these products, scaled
    logits_soft_cap: float | None
    experts: ExpertsConfig | None
    sparse_layers: tuple[bool, ...]  # per layer: a mixture of experts in place of the one feed-forward layer
    dtype: str  # of weights, activations and cache
    eos_token_ids: frozenset[int]

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive number.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is not even: rotary embeddings turn pairs.")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps} is not a small positive number.")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={self.hidden_act!r} is not supported: the layers here do {', '.join(ACTIVATIONS)}."
            )
        for name in ("attention_scale", "attention_soft_cap", "logits_soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} is not a positive number.")
        for name in ("ropes", "sliding_windows", "sparse_layers"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers.")
        if any(self.sparse_layers) and self.experts is None:
            raise ValueError("layers are mixtures of experts, and nothing says of how many.")
        if self.max_position_embeddings < 2:
            raise ValueError(f"max_position_embeddings={self.max_position_embeddings} leaves no room for a request.")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise ValueError(f"sliding_window={min(w for w in self.sliding_windows if w is not None)} is below 1.")
        if not all(isinstance(end_id, int) and end_id >= 0 for end_id in self.eos_token_ids):
            raise ValueError(f"eos_token_id: {sorted(map(str, self.eos_token_ids))} are not all token ids.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is none of {', '.join(DTYPES)}: convert the checkpoint first.")

    @classmethod
    def from_hf(cls, hf_config: Any, *, dtype: str, eos_token_ids: frozenset[int]) -> "ModelConfig":
        """Reads a transformers 5 config, which stays unchanged. `dtype` is the checkpoint's.

        Raises ValueError, by name, on what the layers here do not do.
        """
        if getattr(hf_config, "use_bidirectional_attention", False):
            raise ValueError("use_bidirectional_attention is not supported: every model here looks back only.")
        # What an architecture's config has no field for, the architecture has not; transformers' models say the same.
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return cls(
            model_type=hf_config.model_type,
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=hf_config.rms_norm_eps,
            tie_word_embeddings=hf_config.tie_word_embeddings,
            attention_bias=getattr(hf_config, "attention_bias", False),
            mlp_bias=getattr(hf_config, "mlp_bias", False),
            hidden_act=getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act,
            max_position_embeddings=hf_config.max_position_embeddings,
            ropes=_ropes(hf_config),
            sliding_windows=_sliding_windows(hf_config),
            attention_scale=getattr(hf_config, "query_pre_attn_scalar", head_dim) ** -0.5,
            attention_soft_cap=getattr(hf_config, "attn_logit_softcapping", None),
            logits_soft_cap=getattr(hf_config, "final_logit_softcapping", None),
            experts=_experts(hf_config),
            sparse_layers=_sparse_layers(hf_config),
            dtype=dtype,
            eos_token_ids=eos_token_ids,
        )


def read_hf_config(folder: Path, raw: Mapping[str, Any], stored_dtype: Callable[[], str]) -> ModelConfig:
    """Reads a Hugging Face folder, `raw` being its config.json, without network.

    Values the file leaves out get transformers' own defaults; `stored_dtype` is asked for that of the weights where
    the file names none. End ids come from generation_config.json too. Raises ValueError naming the file and what is
    wrong with it.
    """
    path = folder / "config.json"
    try:
        if quantization := raw.get("quantization_config"):
            read_float8(quantization)  # refuses every other kind
        hf_config = import_transformers().AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        dtype = raw.get("dtype") or raw.get("torch_dtype") or stored_dtype()
        ends = _end_ids(hf_config.eos_token_id)
        if (generation := folder / "generation_config.json").is_file():
            ends |= _end_ids(read_json(generation).get("eos_token_id"))
        return ModelConfig.from_hf(hf_config, dtype=str(dtype).removeprefix("torch."), eos_token_ids=ends)
    except Exception as error:  # with values that make no sense transformers and we fail in any way
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError naming the file when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): a checkpoint folder needs it.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): is the file complete?") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return content


def import_transformers() -> ModuleType:
    """Returns transformers, imported without torch: we use its configs and tokenizers only.

    Where torch happens to be installed transformers would import it, which takes seconds and much memory. A program
    that wants transformers' torch models beside this engine imports torch first.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("transformers")
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # else it advises, at every start, to install torch
    had_quiet = os.environ.get(quiet)
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # the documented way to hide a module
    os.environ[quiet] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        del sys.modules["torch"]
        if had_quiet is None:
            del os.environ[quiet]


def _end_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _ropes(hf_config: Any) -> tuple[RopeConfig | None, ...]:
    parameters = hf_config.rope_parameters or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):  # keyed by the kind of layer
        per_layer = [parameters.get(kind) or {} for kind in _layer_types(hf_config)]
    else:
        per_layer = [parameters] * hf_config.num_hidden_layers
    turns = getattr(hf_config, "no_rope_layers", None) or [1] * hf_config.num_hidden_layers  # the name means its zeros
    limit = hf_config.max_position_embeddings
    return tuple(
        RopeConfig.from_parameters(parameters, max_position_embeddings=limit) if turned else None
        for parameters, turned in zip(per_layer, turns, strict=False)  # a list may go on past the last layer
    )


def _sliding_windows(hf_config: Any) -> tuple[int | None, ...]:
    window = getattr(hf_config, "sliding_window", None)
    if getattr(hf_config, "layer_types", None) is None:  # architectures that do not mix have a window for all layers
        return (window,) * hf_config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_types(hf_config))


def _layer_types(hf_config: Any) -> list[str]:
    kinds = hf_config.layer_types
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != hf_config.num_hidden_layers:
        raise ValueError(f"layer_types of {len(kinds)} layers, with {unknown or 'a wrong length'}, is not supported.")
    return kinds


def _experts(hf_config: Any) -> ExpertsConfig | None:
    if not getattr(hf_config, "num_experts", 0):
        return None
    return ExpertsConfig(
        num_experts=hf_config.num_experts,
        num_experts_per_token=hf_config.num_experts_per_tok,
        intermediate_size=getattr(hf_config, "moe_intermediate_size", hf_config.intermediate_size),
        shared_intermediate_size=getattr(hf_config, "shared_expert_intermediate_size", None),
        normalize_weights=getattr(hf_config, "norm_topk_prob", True),  # Mixtral, without the field, always does
    )


def _sparse_layers(hf_config: Any) -> tuple[bool, ...]:
    num_layers = hf_config.num_hidden_layers
    if not getattr(hf_config, "num_experts", 0):
        return (False,) * num_layers
    step, dense = getattr(hf_config, "decoder_sparse_step", 1), getattr(hf_config, "mlp_only_layers", None) or ()
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
