"""Tiny random checkpoints in Hugging Face's format, the same on every machine: made with numpy, without torch.

`tiny_llama(path)` and `tiny_qwen3(path)` write config.json, model.safetensors and a byte-level tokenizer into the
folder `path` and return it. Keyword arguments change values of config.json; `ABSENT` leaves a key out.
`tests/data/record_expectations.py` records what transformers makes of these models.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ABSENT = object()
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("a", "n"), ("an", "d")]

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


def tiny_llama(path: Path, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Writes a Llama: grouped queries, llama3 rotary scaling, an untied head, 512 ids; 700 kB."""
    return _write(path, _changed(LLAMA_CONFIG, overrides), seed, tokenizer)


def tiny_qwen3(path: Path, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Writes a Qwen3: one KV head, norms on q and k, a tied head, 512 ids; 500 kB."""
    return _write(path, _changed(QWEN3_CONFIG, overrides), seed, tokenizer)


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the float32 tensors under Hugging Face's names, large enough that greedy output varies.

    A tensor depends on the seed, its name and its shape alone.
    """
    D, F = config["hidden_size"], config["intermediate_size"]
    V, H = config["vocab_size"], config["head_dim"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (D,)
        for name, rows, columns in (("q", N * H, D), ("k", K * H, D), ("v", K * H, D), ("o", D, N * H)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, columns)
            if config.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (H,)
        for name, rows, columns in (("gate", F, D), ("up", F, D), ("down", D, F)):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (rows, columns)
            if config.get("mlp_bias"):
                shapes[f"{at}.mlp.{name}_proj.bias"] = (rows,)
    return {name: _draw(name, shape, seed) for name, shape in shapes.items()}


def write_tokenizer(folder: Path):
    """Writes a byte-level tokenizer with a few merges, three special tokens and a chat template: 266 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*pieces, *SPECIAL_TOKENS])}
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _changed(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | overrides).items() if value is not ABSENT}


def _write(folder: Path, config: dict[str, Any], seed: int, tokenizer: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    dtype = _numpy_dtype(config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = {name: value.astype(dtype) for name, value in tiny_weights(config, seed).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def _numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":  # numpy has it from jax's company only; what records expectations runs without
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    # RandomState is frozen: its numbers do not change with numpy's version.
    values = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode())).standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.2 * values
        if name == "model.norm.weight":
            values = 3 * values  # spreads the logits, so that near ties are rare
    elif name.endswith(".bias"):
        values = 0.2 * values
    elif "embed_tokens" in name:
        values = 0.1 * values  # below what the layers add: a tied head would else repeat its input
    else:
        values = 1.5 * values / np.sqrt(shape[1])
    return values.astype(np.float32)
