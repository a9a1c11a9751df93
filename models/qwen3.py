"""Qwen3, dense: Llama with a norm over each head of q and k before the rotary embedding."""

from jaxvllm.models import llama
from jaxvllm.models.layers import Style

WEIGHTS = llama.WEIGHTS | {  # Hugging Face's name: our path; * is the layer's number
    "model.layers.*.self_attn.q_norm.weight": "layers.*.attention.q_norm.weight",
    "model.layers.*.self_attn.k_norm.weight": "layers.*.attention.k_norm.weight",
}

STYLE = Style(qk_norm="head")
