from pathlib import Path

import gguf
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from tiny_models import LLAMA_CONFIG, QWEN3_CONFIG, tiny_weights

from jaxvllm.models.gguf import GGUFFile, unpermute
from jaxvllm.models.loader import load_model, read_config
from jaxvllm.models.rope import RopeConfig

NO_CHANGE = ("rope.scaling.type", "none")


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: row i of a head's first half, then row i of its second half."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def write_gguf(path: Path, *, arch: str = "llama", kind: Kind = Kind.F32, extra=(NO_CHANGE,), tensors=None, **config):
    """Writes a tiny model as llama.cpp's converter does; returns its float32 weights under Hugging Face's names.

    `kind` is what the matrices are quantised to, `extra` more metadata of the architecture, `tensors` more tensors
    under their GGUF names (None drops one).
    """
    config = (LLAMA_CONFIG if arch == "llama" else QWEN3_CONFIG) | config
    weights = tiny_weights(config)
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config["num_hidden_layers"]
    )
    stored = {}
    for name, rows in weights.items():
        if arch == "llama" and ".q_proj." in name:
            rows = permute(rows, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            rows = permute(rows, config["num_key_value_heads"])
        stored[names.get_name(name, try_suffixes=(".weight", ".bias"))] = rows
    stored |= tensors or {}

    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 1e6))
    writer.add_key_length(config["head_dim"])
    writer.add_eos_token_id(258)
    writer.add_token_list([b"a", b"b", "漢字".encode(), b"\xe2\x96"])  # the last: half a character
    writer.add_token_scores([0.0, -1.0, -2.5, 3.0])
    for key, value in extra:
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        else:
            writer.add_float32(f"{arch}.{key}", value)
    for name, rows in stored.items():
        if rows is not None and rows.ndim == 2:
            writer.add_tensor(name, gguf.quantize(rows, kind), raw_dtype=kind)
        elif rows is not None:
            writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def assert_loads(path: Path, weights: dict[str, np.ndarray], atol: float = 0):
    _, model = load_model(path, dtype="float32")
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    pairs = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.layers.1.self_attn.q_proj.weight": attention.q.weight,
        "model.layers.1.self_attn.k_proj.weight": attention.k.weight,
        "model.layers.1.self_attn.v_proj.weight": attention.v.weight,
        "model.layers.1.self_attn.o_proj.weight": attention.o.weight,
        "model.layers.1.mlp.gate_proj.weight": mlp.gate.weight,
        "model.layers.1.mlp.down_proj.weight": mlp.down.weight,
        "model.layers.1.post_attention_layernorm.weight": model.layers[1].mlp_norm.weight,
        "model.norm.weight": model.norm.weight,
    }
    if model.head is not None:
        pairs["lm_head.weight"] = model.head.weight
    for name, param in pairs.items():
        np.testing.assert_allclose(param[...], weights[name], rtol=0, atol=atol, err_msg=name)
    loaded = sum(param.size for _, param in nnx.to_flat_state(nnx.state(model)))
    assert loaded == sum(rows.size for rows in weights.values())


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_weights_come_back_in_hugging_face_names_and_order(arch, tmp_path):
    weights = write_gguf(tmp_path / "m.gguf", arch=arch)
    assert_loads(tmp_path / "m.gguf", weights)


def test_biases_are_unpermuted_with_their_rows(tmp_path):
    weights = write_gguf(tmp_path / "m.gguf", attention_bias=True)
    _, model = load_model(tmp_path / "m.gguf", dtype="float32")
    for part in "qk":
        stored = weights[f"model.layers.0.self_attn.{part}_proj.bias"]
        np.testing.assert_array_equal(getattr(model.layers[0].attention, part).bias[...], stored)


@pytest.mark.parametrize(("kind", "error"), [(Kind.F16, 2e-3), (Kind.BF16, 2e-2), (Kind.Q8_0, 2e-2), (Kind.Q4_1, 0.4)])
def test_quantised_matrices_are_dequantised(kind, error, tmp_path):
    weights = write_gguf(tmp_path / "m.gguf", kind=kind)
    assert_loads(tmp_path / "m.gguf", weights, atol=error)


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.Q8_0, "bfloat16")])
def test_dtype_is_that_of_the_matrices_and_bfloat16_for_quantised_ones(kind, dtype, tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=kind)
    assert load_model(tmp_path / "m.gguf")[0].dtype == dtype


def test_config_is_read_from_the_metadata(tmp_path):
    write_gguf(tmp_path / "m.gguf", arch="qwen3")
    config = read_config(tmp_path / "m.gguf")
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("qwen3", 512, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 1, 32)
    assert (config.intermediate_size, config.max_position_embeddings) == (128, 512)
    assert config.rms_norm_eps == pytest.approx(1e-6)
    assert config.tie_word_embeddings
    assert set(config.ropes) == {RopeConfig(rope_type="default", theta=1e6)}
    assert config.eos_token_ids == {258}


def test_a_token_that_is_half_a_character_is_read(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b", "漢字", "\udce2\udc96"]
    assert metadata["general.architecture"] == "llama"


def test_linear_rotary_scaling_is_read(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra=[("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0)])
    assert set(read_config(tmp_path / "m.gguf").ropes) == {RopeConfig(rope_type="linear", theta=10000.0, factor=4.0)}


def test_rotary_divisors_of_llama_3_are_read(tmp_path):
    divisors = np.array([1, 1, 1, 1, 1.5, 4, 8, 8], np.float32)
    write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors})
    rope = load_model(tmp_path / "m.gguf")[0].ropes[0]
    assert rope == RopeConfig(rope_type="divisors", theta=10000.0, divisors=tuple(divisors.tolist()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arch": "gemma3"},
            "general.architecture='gemma3' is not supported: the supported ones are llama, qwen3",
        ),
        ({"extra": [("rope.scaling.type", "yarn")]}, "rotary type 'yarn' is not supported"),
        ({"extra": [("expert_count", 8.0)]}, "mixture of experts"),
        ({"extra": [("rope.dimension_count", 8.0)]}, "rope.dimension_count=8.0 is not the head size 16"),
        ({"tensors": {"token_embd.weight": None}}, "the tensor 'token_embd.weight' is missing"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "m.gguf lacks the tensor 'blk.1.ffn_up.weight'"),
        (
            {"tensors": {"blk.0.extra.weight": np.ones(4, np.float32)}},
            "holds the tensor 'blk.0.extra.weight'",
        ),
        (
            {"tensors": {"output_norm.weight": np.ones(4, np.float32)}},
            r"'output_norm.weight' is \[4\].*\[64\]",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")


def test_type_that_gguf_cannot_dequantise_is_named(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", kind=Kind.Q8_0)
    content = (tmp_path / "m.gguf").read_bytes()
    place = content.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 2 * 8  # its count and sizes
    assert content[place] == Kind.Q8_0
    for number, message in (
        (Kind.Q8_1, "'blk.0.attn_v.weight' is Q8_1, which"),
        (99, r"99\)? is not a valid GGMLQuantizationType"),
    ):
        (tmp_path / "m.gguf").write_bytes(content[:place] + bytes([number]) + content[place + 1 :])
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [4, 8, 30, 200, 1000, 0.5, -1], ids=str)
def test_truncated_file_is_named(kept, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"m.gguf is truncated"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file"])
def test_file_that_is_no_gguf_is_refused(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"m.gguf is not a GGUF file"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("version", [1, 4, 3 << 24])  # the last: a file of the other byte order
def test_other_versions_are_refused(version, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:4] + version.to_bytes(4, "little") + content[8:])
    with pytest.raises(ValueError, match=r"m.gguf is truncated, broken or of an unknown kind"):
        load_model(tmp_path / "m.gguf")


def test_unpermute_undoes_the_order_of_llama_cpp():
    rows = np.arange(24).reshape(12, 2)
    assert (permute(rows, 2)[:, 0] == [0, 6, 2, 8, 4, 10, 12, 18, 14, 20, 16, 22]).all()
    np.testing.assert_array_equal(unpermute(permute(rows, 2), 2), rows)
