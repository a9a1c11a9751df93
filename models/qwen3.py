"""Qwen3, dense."""

from jaxvllm.models import llama
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.layers import Decoder, DecoderLayer

WEIGHTS = {  # Hugging Face's name: our path; * is the layer's number
    **llama.WEIGHTS,
    "model.layers.*.self_attn.q_norm.weight": "layers.*.attention.q_norm.weight",
    "model.layers.*.self_attn.k_norm.weight": "layers.*.attention.k_norm.weight",
}


class Qwen3(Decoder):
    """Llama's layers, with a norm over each head of q and k before the rotary embedding."""

    def __init__(self, config: ModelConfig):
        windows = config.sliding_windows
        super().__init__(config, [DecoderLayer(config, sliding_window=w, qk_norm=True) for w in windows])
