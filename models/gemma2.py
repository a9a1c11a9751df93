"""Gemma 2: norms before and after each part, by 1 + weight; a scaled embedding. Windows and caps from the config."""

from jaxvllm.models import llama
from jaxvllm.models.layers import Style

WEIGHTS = llama.WEIGHTS | {  # Hugging Face's name: our path; * is the layer's number
    "model.layers.*.post_attention_layernorm.weight": "layers.*.attention_output_norm.weight",
    "model.layers.*.pre_feedforward_layernorm.weight": "layers.*.mlp_norm.weight",
    "model.layers.*.post_feedforward_layernorm.weight": "layers.*.mlp_output_norm.weight",
}

STYLE = Style(output_norms=True, norm_offset=1.0, scaled_embedding=True)
