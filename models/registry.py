"""Which module and which weight map serve an architecture."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxvllm.models import (
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from jaxvllm.models.checkpoint.weight_map import WeightMap
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Architecture:
    """`make(config)` builds the module; `weights` maps Hugging Face's tensor names to its paths."""

    make: Callable[[ModelConfig], Decoder]
    weights: WeightMap


ARCHITECTURES = {  # Hugging Face's model_type
    "gemma2": Architecture(gemma2.Gemma2, gemma2.WEIGHTS),
    "gemma3_text": Architecture(gemma3.Gemma3, gemma3.WEIGHTS),
    "llama": Architecture(llama.Llama, llama.WEIGHTS),
    "mistral": Architecture(mistral.Mistral, mistral.WEIGHTS),
    "mixtral": Architecture(mixtral.Mixtral, mixtral.WEIGHTS),
    "olmo2": Architecture(olmo2.Olmo2, olmo2.WEIGHTS),
    "phi3": Architecture(phi3.Phi3, phi3.WEIGHTS),
    "qwen2": Architecture(qwen2.Qwen2, qwen2.WEIGHTS),
    "qwen2_moe": Architecture(qwen2_moe.Qwen2Moe, qwen2_moe.WEIGHTS),
    "qwen3": Architecture(qwen3.Qwen3, qwen3.WEIGHTS),
    "qwen3_moe": Architecture(qwen3_moe.Qwen3Moe, qwen3_moe.WEIGHTS),
    "smollm3": Architecture(smollm3.SmolLM3, smollm3.WEIGHTS),
}


def resolve(model_type: str) -> Architecture:
    """Returns the architecture. Raises ValueError with the list of supported ones."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model_type!r} is not supported: the supported ones are {', '.join(sorted(ARCHITECTURES))}."
        )
    return ARCHITECTURES[model_type]
