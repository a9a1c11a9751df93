"""Qwen3-MoE: Qwen3 with experts in the layers that the config names."""

from jaxvllm.models import qwen3

WEIGHTS = qwen3.WEIGHTS | {  # Hugging Face's name: our path; the first * is the layer's number, the second the expert's
    "model.layers.*.mlp.gate.weight": "layers.*.experts.router.weight",
    "model.layers.*.mlp.experts.*.gate_proj.weight": "layers.*.experts.gate.weight",
    "model.layers.*.mlp.experts.*.up_proj.weight": "layers.*.experts.up.weight",
    "model.layers.*.mlp.experts.*.down_proj.weight": "layers.*.experts.down.weight",
}
