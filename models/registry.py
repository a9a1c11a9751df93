"""The architectures, as data: how each names its weights, and how its layers differ where its config is silent."""

from dataclasses import dataclass

from jaxvllm.models import gemma2, gemma3, llama, mixtral, olmo2, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe
from jaxvllm.models.checkpoint.weight_map import WeightMap
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Style


@dataclass(frozen=True, slots=True)
class Architecture:
    """`weights` maps Hugging Face's tensor names to the paths of a `Decoder` with this `style`."""

    weights: WeightMap
    style: Style

    def make(self, config: ModelConfig) -> Decoder:
        """Builds the module, its weights not yet loaded."""
        return Decoder(config, self.style)


ARCHITECTURES = {  # Hugging Face's model_type
    "gemma2": Architecture(gemma2.WEIGHTS, gemma2.STYLE),
    "gemma3_text": Architecture(gemma3.WEIGHTS, gemma3.STYLE),
    "llama": Architecture(llama.WEIGHTS, llama.STYLE),
    "mistral": Architecture(llama.WEIGHTS, llama.STYLE),  # the config may give every layer a sliding window
    "mixtral": Architecture(mixtral.WEIGHTS, llama.STYLE),
    "olmo2": Architecture(olmo2.WEIGHTS, olmo2.STYLE),
    "phi3": Architecture(phi3.WEIGHTS, llama.STYLE),
    "qwen2": Architecture(llama.WEIGHTS, qwen2.STYLE),
    "qwen2_moe": Architecture(qwen2_moe.WEIGHTS, qwen2_moe.STYLE),
    "qwen3": Architecture(qwen3.WEIGHTS, qwen3.STYLE),
    "qwen3_moe": Architecture(qwen3_moe.WEIGHTS, qwen3.STYLE),
    "smollm3": Architecture(llama.WEIGHTS, llama.STYLE),  # the config names the layers without rotary embedding
}


def resolve(model_type: str) -> Architecture:
    """Returns the architecture. Raises ValueError with the list of supported ones."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model_type!r} is not supported: the supported ones are {', '.join(sorted(ARCHITECTURES))}."
        )
    return ARCHITECTURES[model_type]
