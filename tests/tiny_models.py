"""Tiny random checkpoints in Hugging Face's format, the same on every machine: made with numpy, without torch.

`tiny_model(path, model_type)` writes config.json, model.safetensors and a byte-level tokenizer into the folder `path`
and returns it. Keyword arguments change values of config.json; `ABSENT` leaves a key out.
`tests/data/record_expectations.py` records what transformers makes of these models.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_configs import CONFIGS

ABSENT = object()
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("a", "n"), ("an", "d")]


def tiny_model(path: Path, model_type: str, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Writes a model of an architecture, 512 ids, less than 1 MB."""
    return _write(path, _changed(CONFIGS[model_type], overrides), seed, tokenizer)


def tiny_llama(path: Path, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Writes a Llama: grouped queries, llama3 rotary scaling, an untied head, 512 ids; 700 kB."""
    return tiny_model(path, "llama", seed=seed, tokenizer=tokenizer, **overrides)


def tiny_qwen3(path: Path, *, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> Path:
    """Writes a Qwen3: one KV head, norms on q and k, a tied head, 512 ids; 500 kB."""
    return tiny_model(path, "qwen3", seed=seed, tokenizer=tokenizer, **overrides)


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the float32 tensors under Hugging Face's names, large enough that greedy output varies.

    A tensor depends on the seed, its name and its shape alone, and on whether the model's norms multiply by 1 + weight.
    """
    D, V, kind = config["hidden_size"], config["vocab_size"], config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        layer = _attention_shapes(config) | (_experts_shapes if _is_sparse(config, i) else _mlp_shapes)(config)
        norms = ["post_attention_layernorm"]
        if kind != "olmo2":
            norms.append("input_layernorm")
        if kind in ("olmo2", "gemma2", "gemma3_text"):
            norms.append("post_feedforward_layernorm")
        if kind in ("gemma2", "gemma3_text"):
            norms.append("pre_feedforward_layernorm")
        layer |= {f"{name}.weight": (D,) for name in norms}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    weights = {name: _draw(name, shape, seed) for name, shape in shapes.items()}
    if kind in ("gemma2", "gemma3_text"):  # which scale what they embed, and add 1 to what they norm by
        weights["model.embed_tokens.weight"] /= np.sqrt(D)
        weights["model.norm.weight"] *= np.sqrt(D)
        weights = {name: value - ("norm" in name) for name, value in weights.items()}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, N, K = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    H, kind = config.get("head_dim") or D // N, config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (D, N * H)}
    if kind == "phi3":
        return shapes | {"self_attn.qkv_proj.weight": ((N + 2 * K) * H, D)}
    for name, rows in (("q", N * H), ("k", K * H), ("v", K * H)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, D)
        if config.get("attention_bias") or kind in ("qwen2", "qwen2_moe"):
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (D,)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
    if kind == "olmo2":
        shapes |= {"self_attn.q_norm.weight": (N * H,), "self_attn.k_norm.weight": (K * H,)}
    return shapes


def _mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, F = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "phi3":
        return {"mlp.gate_up_proj.weight": (2 * F, D), "mlp.down_proj.weight": (D, F)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (("gate", F, D), ("up", F, D), ("down", D, F)):
        shapes[f"mlp.{name}_proj.weight"] = (rows, columns)
        if config.get("mlp_bias"):
            shapes[f"mlp.{name}_proj.bias"] = (rows,)
    return shapes


def _is_sparse(config: dict[str, Any], layer: int) -> bool:
    return ("num_experts" in config or "num_local_experts" in config) and layer not in config.get("mlp_only_layers", ())


def _experts_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, mixtral = config["hidden_size"], config["model_type"] == "mixtral"
    F = config["intermediate_size" if mixtral else "moe_intermediate_size"]
    E = config["num_local_experts" if mixtral else "num_experts"]
    at, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    shapes = {f"{at}.gate.weight": (E, D)}
    for i in range(E):
        shapes |= {f"{at}.experts.{i}.{name}.weight": (F, D) for name in names[:2]}
        shapes[f"{at}.experts.{i}.{names[2]}.weight"] = (D, F)
    if shared := config.get("shared_expert_intermediate_size"):
        shapes |= {f"mlp.shared_expert.{name}.weight": (shared, D) for name in names[:2]}
        shapes |= {"mlp.shared_expert.down_proj.weight": (D, shared), "mlp.shared_expert_gate.weight": (1, D)}
    return shapes


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
