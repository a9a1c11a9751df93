"""Mistral."""

from jaxvllm.models import llama
from jaxvllm.models.decoder import Decoder

WEIGHTS = llama.WEIGHTS


class Mistral(Decoder):
    """Llama's layers; the config may give all of them a sliding window."""
