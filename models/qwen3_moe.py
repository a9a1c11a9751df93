"""Qwen3, mixtures of experts."""

from jaxvllm.models import qwen3
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Style

WEIGHTS = qwen3.WEIGHTS | {  # Hugging Face's name: our path; the first * is the layer's number, the second the expert's
    "model.layers.*.mlp.gate.weight": "layers.*.experts.router.weight",
    "model.layers.*.mlp.experts.*.gate_proj.weight": "layers.*.experts.gate.weight",
    "model.layers.*.mlp.experts.*.up_proj.weight": "layers.*.experts.up.weight",
    "model.layers.*.mlp.experts.*.down_proj.weight": "layers.*.experts.down.weight",
}


class Qwen3Moe(Decoder):
    """Qwen3's attention; the config says which layers are mixtures and how their experts are weighed."""

    style = Style(qk_norm="head")
