"""Llama 1 to 3 and the models of its shape (Mistral, SmolLM2, SmolLM3): norms before attention and feed-forward."""

from jaxvllm.models.layers import Style

WEIGHTS = {  # Hugging Face's name: our path; * is the layer's number
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.*.input_layernorm.weight": "layers.*.attention_norm.weight",
    "model.layers.*.self_attn.q_proj.weight": "layers.*.attention.q.weight",
    "model.layers.*.self_attn.q_proj.bias": "layers.*.attention.q.bias",
    "model.layers.*.self_attn.k_proj.weight": "layers.*.attention.k.weight",
    "model.layers.*.self_attn.k_proj.bias": "layers.*.attention.k.bias",
    "model.layers.*.self_attn.v_proj.weight": "layers.*.attention.v.weight",
    "model.layers.*.self_attn.v_proj.bias": "layers.*.attention.v.bias",
    "model.layers.*.self_attn.o_proj.weight": "layers.*.attention.o.weight",
    "model.layers.*.self_attn.o_proj.bias": "layers.*.attention.o.bias",
    "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm.weight",
    "model.layers.*.mlp.gate_proj.weight": "layers.*.mlp.gate.weight",
    "model.layers.*.mlp.gate_proj.bias": "layers.*.mlp.gate.bias",
    "model.layers.*.mlp.up_proj.weight": "layers.*.mlp.up.weight",
    "model.layers.*.mlp.up_proj.bias": "layers.*.mlp.up.bias",
    "model.layers.*.mlp.down_proj.weight": "layers.*.mlp.down.weight",
    "model.layers.*.mlp.down_proj.bias": "layers.*.mlp.down.bias",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}

STYLE = Style()
