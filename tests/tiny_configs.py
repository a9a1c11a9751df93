"""Values of config.json for a tiny model of each architecture."""

from typing import Any

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": {  # short original context, so that the scaling changes most frequencies
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": None,
    "eos_token_id": 258,
    "torch_dtype": "float32",
}
QWEN3_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,  # not hidden_size / num_attention_heads, as in the real ones
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": None,
    "eos_token_id": 258,
    "dtype": "float32",
}


# What most of the small ones below share. Windows, where there are any, are shorter than most prompts.
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    "torch_dtype": "float32",
}
_GEMMA: dict[str, Any] = _COMMON | {
    "head_dim": 32,  # not hidden_size / num_attention_heads, and not query_pre_attn_scalar, as in the 27B ones
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 24,
}
CONFIGS: dict[str, dict[str, Any]] = {  # by model_type
    "llama": LLAMA_CONFIG,
    "qwen3": QWEN3_CONFIG,
    "qwen2": _COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "mistral": _COMMON | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "gemma2": _GEMMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 4.0,  # low enough to bend the larger scores
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": _GEMMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 3,  # every third layer sees everything
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},  # of the layers that see everything
    },
    "olmo2": _COMMON | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False},
    "phi3": _COMMON
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": 512,
        "sliding_window": 40,
    },
    "smollm3": _COMMON
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layer_interval": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "qwen2_moe": _COMMON
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "use_sliding_window": True,  # of every other layer
        "sliding_window": 24,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
    },
    "mixtral": _COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
