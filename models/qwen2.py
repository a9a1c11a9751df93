"""Qwen2 and Qwen2.5."""

from jaxvllm.models import llama
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Style

WEIGHTS = llama.WEIGHTS


class Qwen2(Decoder):
    """Llama's layers, with biases on q, k and v; its config does not mention them."""

    style = Style(qkv_bias=True, o_bias=False)
