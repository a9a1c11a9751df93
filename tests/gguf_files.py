"""Tiny models as GGUF files, written as llama.cpp's converter writes them."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tiny_models import ABSENT, CONFIGS, tiny_weights

ARCHITECTURES = {  # model_type: general.architecture
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
}
NO_CHANGE = ("rope.scaling.type", "none")


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: row i of a head's first half, then row i of its second half."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def write_gguf(
    path: Path,
    *,
    model_type: str = "llama",
    kind: Kind = Kind.F32,
    extra: Any = (NO_CHANGE,),
    tensors: dict[str, np.ndarray | None] | None = None,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Writes a tiny model; returns its float32 weights under Hugging Face's names.

    `kind` is what the matrices are quantised to, `extra` more metadata of the architecture, `tensors` more tensors
    under their GGUF names (None drops one).
    """
    config = {key: value for key, value in (CONFIGS[model_type] | config).items() if value is not ABSENT}
    weights = tiny_weights(config)
    stored = _stored(config, weights) | (tensors or {})
    writer = gguf.GGUFWriter(path, ARCHITECTURES[model_type])
    _write_metadata(writer, config)
    for key, value in extra:
        name = f"{ARCHITECTURES[model_type]}.{key}"
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ](name, value)
    for name, rows in stored.items():
        if rows is not None and rows.ndim >= 2:
            writer.add_tensor(name, gguf.quantize(rows, kind), raw_dtype=kind)
        elif rows is not None:
            writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]):
    heads, kind = config["num_attention_heads"], config["model_type"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 1e6))
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    writer.add_eos_token_id(258)
    writer.add_token_list([b"a", b"b", "漢字".encode(), b"\xe2\x96"])  # the last: half a character
    writer.add_token_scores([0.0, -1.0, -2.5, 3.0])


def _stored(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray | None]:
    """Returns the tensors under their GGUF names: rows reordered, norms shifted, experts stacked."""
    kind = config["model_type"]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, rows in weights.items():
        if ARCHITECTURES[kind] in ("llama", "smollm3"):
            for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if f".{part}_proj." in name:
                    rows = permute(rows, config[heads])
        if kind in ("gemma2", "gemma3_text") and "norm" in name:
            rows = rows + np.float32(1)
        stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(rows)
    stored: dict[str, np.ndarray | None] = {}
    for name, rows in stacks.items():
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, f"gguf has no name for {name}"
        stored[stored_name] = np.stack(rows) if ".experts." in name else rows[0].squeeze()
    return stored
