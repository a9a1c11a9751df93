"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, which the config does not mention."""

from jaxvllm.models.layers import Style

STYLE = Style(qkv_bias=True, o_bias=False)
