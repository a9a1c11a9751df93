"""SmolLM3."""

from jaxvllm.models import llama
from jaxvllm.models.decoder import Decoder

WEIGHTS = llama.WEIGHTS


class SmolLM3(Decoder):
    """Llama's layers, some without rotary embedding: the config says which."""
