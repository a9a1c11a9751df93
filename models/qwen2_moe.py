"""Qwen1.5-MoE and Qwen2, mixtures of experts."""

from jaxvllm.models import qwen3_moe
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Style

WEIGHTS = qwen3_moe.WEIGHTS | {  # Hugging Face's name: our path; * is the layer's number
    "model.layers.*.mlp.shared_expert.gate_proj.weight": "layers.*.experts.shared.gate.weight",
    "model.layers.*.mlp.shared_expert.up_proj.weight": "layers.*.experts.shared.up.weight",
    "model.layers.*.mlp.shared_expert.down_proj.weight": "layers.*.experts.shared.down.weight",
    "model.layers.*.mlp.shared_expert_gate.weight": "layers.*.experts.shared_gate.weight",
}


class Qwen2Moe(Decoder):
    """Qwen2's biases; beside the experts of the router one that every token goes through, weighed by a gate."""

    style = Style(qkv_bias=True, o_bias=False, shared_expert_gate=True)
