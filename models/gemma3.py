"""Gemma 3, text."""

from jaxvllm.models import gemma2, qwen3
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Style

WEIGHTS = qwen3.WEIGHTS | gemma2.WEIGHTS


class Gemma3(Decoder):
    """Gemma 2's layers with a norm over each head of q and k. Windows and rotary bases per layer from the config."""

    style = Style(output_norms=True, norm_offset=1.0, scaled_embedding=True, qk_norm="head")
