"""Which module and which weight map serve an architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxvllm.models import llama, qwen3
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.layers import Decoder


@dataclass(frozen=True, slots=True)
class Architecture:
    """`make(config)` builds the module; `weights` maps Hugging Face's tensor names to its paths."""

    make: Callable[[ModelConfig], Decoder]
    weights: Mapping[str, str]


ARCHITECTURES = {  # Hugging Face's model_type
    "llama": Architecture(llama.Llama, llama.WEIGHTS),
    "qwen3": Architecture(qwen3.Qwen3, qwen3.WEIGHTS),
}


def resolve(model_type: str) -> Architecture:
    """Returns the architecture. Raises ValueError with the list of supported ones."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model_type!r} is not supported: the supported ones are {', '.join(sorted(ARCHITECTURES))}."
        )
    return ARCHITECTURES[model_type]
