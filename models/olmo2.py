"""OLMo 2."""

from jaxvllm.models import qwen3
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Style

WEIGHTS = qwen3.WEIGHTS | {  # Hugging Face's name: our path; * is the layer's number
    "model.layers.*.post_attention_layernorm.weight": "layers.*.attention_output_norm.weight",
    "model.layers.*.post_feedforward_layernorm.weight": "layers.*.mlp_output_norm.weight",
}


class Olmo2(Decoder):
    """Norms after attention and feed-forward and none before; one norm over all heads of q, one over all of k."""

    style = Style(input_norms=False, output_norms=True, qk_norm="all")
