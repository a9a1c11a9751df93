"""OLMo 2: norms after attention and feed-forward, none before; one norm over all heads of q, one over all of k."""

from jaxvllm.models import qwen3
from jaxvllm.models.layers import Style

WEIGHTS = qwen3.WEIGHTS | {  # Hugging Face's name: our path; * is the layer's number
    "model.layers.*.post_attention_layernorm.weight": "layers.*.attention_output_norm.weight",
    "model.layers.*.post_feedforward_layernorm.weight": "layers.*.mlp_output_norm.weight",
}

STYLE = Style(input_norms=False, output_norms=True, qk_norm="all")
