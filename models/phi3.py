"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused weights; longrope, window and partial rotation from the config."""

WEIGHTS = {  # Hugging Face's name: our path, or the paths of its rows in their order; * is the layer's number
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.*.input_layernorm.weight": "layers.*.attention_norm.weight",
    "model.layers.*.self_attn.qkv_proj.weight": (
        "layers.*.attention.q.weight",
        "layers.*.attention.k.weight",
        "layers.*.attention.v.weight",
    ),
    "model.layers.*.self_attn.o_proj.weight": "layers.*.attention.o.weight",
    "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm.weight",
    "model.layers.*.mlp.gate_up_proj.weight": ("layers.*.mlp.gate.weight", "layers.*.mlp.up.weight"),
    "model.layers.*.mlp.down_proj.weight": "layers.*.mlp.down.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
