"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared expert for every token, weighted by a gate."""

from dataclasses import replace

from jaxvllm.models import qwen2, qwen3_moe

WEIGHTS = qwen3_moe.WEIGHTS | {  # Hugging Face's name: our path; * is the layer's number
    "model.layers.*.mlp.shared_expert.gate_proj.weight": "layers.*.experts.shared.gate.weight",
    "model.layers.*.mlp.shared_expert.up_proj.weight": "layers.*.experts.shared.up.weight",
    "model.layers.*.mlp.shared_expert.down_proj.weight": "layers.*.experts.shared.down.weight",
    "model.layers.*.mlp.shared_expert_gate.weight": "layers.*.experts.shared_gate.weight",
}

STYLE = replace(qwen2.STYLE, shared_expert_gate=True)
