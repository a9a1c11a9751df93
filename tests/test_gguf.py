import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from gguf_files import ARCHITECTURES, permute, write_gguf
from tiny_models import CONFIGS, tiny_model

from jaxvllm.models.checkpoint.gguf import GGUFFile, unpermute
from jaxvllm.models.checkpoint.gguf_config import DIALECTS
from jaxvllm.models.checkpoint.loader import load_model, read_config
from jaxvllm.models.rope import RopeConfig

LONGROPE = {"short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25], "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]}
# Where the two formats can say the same: changes to the config, and what the file says of them.
CASES = {
    "gemma2": ({"query_pre_attn_scalar": 32}, {}),
    "gemma3_text": (
        {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7},
        {"extra": [("rope.scaling.type", "linear"), ("rope.scaling.factor", 8.0)]},
    ),
    "llama": ({"rope_scaling": None}, {}),
    "mistral": ({}, {}),
    "mixtral": ({}, {}),
    "olmo2": ({}, {}),
    "phi3": (
        {
            "sliding_window": 40,
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE | {"type": "longrope", "attention_factor": 1.25},
        },
        {
            "extra": [
                ("rope.scaling.original_context_length", 128),
                ("rope.dimension_count", 12),
                ("rope.scaling.attn_factor", 1.25),
            ],
            "tensors": {
                "rope_factors_short.weight": np.array(LONGROPE["short_factor"], np.float32),
                "rope_factors_long.weight": np.array(LONGROPE["long_factor"], np.float32),
            },
        },
    ),
    "qwen2": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {
            "extra": [
                ("rope.scaling.type", "yarn"),
                ("rope.scaling.factor", 4.0),
                ("rope.scaling.original_context_length", 128),
            ]
        },
    ),
    "qwen2_moe": (
        {"use_sliding_window": True, "max_window_layers": 2},
        {"extra": [("attention.sliding_window_pattern", [True, False])]},
    ),
    "qwen3": ({}, {}),
    "qwen3_moe": ({"mlp_only_layers": []}, {}),
    "smollm3": ({"num_hidden_layers": 5, "no_rope_layer_interval": 4}, {}),
}


def assert_loads(path: Path, weights: dict[str, np.ndarray], atol: float = 0):
    _, model = load_model(path, dtype="float32")
    attention, mlp, mlp_norm = model.layers[1].attention, model.layers[1].mlp, model.layers[1].mlp_norm
    assert mlp is not None
    assert mlp_norm is not None
    pairs = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.layers.1.self_attn.q_proj.weight": attention.q.weight,
        "model.layers.1.self_attn.k_proj.weight": attention.k.weight,
        "model.layers.1.self_attn.v_proj.weight": attention.v.weight,
        "model.layers.1.self_attn.o_proj.weight": attention.o.weight,
        "model.layers.1.mlp.gate_proj.weight": mlp.gate.weight,
        "model.layers.1.mlp.down_proj.weight": mlp.down.weight,
        "model.layers.1.post_attention_layernorm.weight": mlp_norm.weight,
        "model.norm.weight": model.norm.weight,
    }
    if model.head is not None:
        pairs["lm_head.weight"] = model.head.weight
    for name, param in pairs.items():
        np.testing.assert_allclose(param[...], weights[name], rtol=0, atol=atol, err_msg=name)
    loaded = sum(param.size for _, param in nnx.to_flat_state(nnx.state(model)))
    assert loaded == sum(rows.size for rows in weights.values())


def test_every_architecture_is_covered():
    assert set(CASES) == set(ARCHITECTURES) == set(CONFIGS)
    assert set(ARCHITECTURES.values()) == set(DIALECTS)


@pytest.mark.parametrize("model_type", CASES)
def test_file_is_the_model_of_the_hugging_face_folder(model_type, tmp_path):
    changes, in_file = CASES[model_type]
    config, model = load_model(tiny_model(tmp_path / "hf", model_type, tokenizer=False, **changes))
    write_gguf(tmp_path / "m.gguf", model_type=model_type, **changes, **in_file)
    found_config, found = load_model(tmp_path / "m.gguf")
    assert found_config.rms_norm_eps == pytest.approx(config.rms_norm_eps)  # a float32 in the file
    model_type = "llama" if model_type == "mistral" else model_type  # the same layers; GGUF tells them not apart
    assert dataclasses.replace(found_config, rms_norm_eps=config.rms_norm_eps) == dataclasses.replace(
        config, model_type=model_type
    )
    weights, found_weights = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, found))
    assert weights.keys() == found_weights.keys()
    for path, param in weights.items():
        atol = 5e-7 if "gemma" in model_type and "norm" in str(path) else 0  # 1 is added and taken away
        np.testing.assert_allclose(found_weights[path][...], param[...], rtol=0, atol=atol, err_msg=str(path))


@pytest.mark.parametrize(("model_type", "num_layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemmas_scale_by_the_hidden_size(model_type, num_layers, tmp_path):
    write_gguf(tmp_path / "m.gguf", model_type=model_type, num_hidden_layers=num_layers)
    assert read_config(tmp_path / "m.gguf").attention_scale == (64 / 4) ** -0.5
    write_gguf(tmp_path / "m.gguf", model_type=model_type, num_hidden_layers=3)
    assert read_config(tmp_path / "m.gguf").attention_scale == 32**-0.5


def test_windows_of_each_layer_may_be_in_the_file(tmp_path):
    pattern = [("attention.sliding_window_pattern", [False, True, True])]
    write_gguf(tmp_path / "m.gguf", model_type="gemma3_text", extra=pattern)
    assert read_config(tmp_path / "m.gguf").sliding_windows == (None, 24, 24)


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
    write_gguf(tmp_path / "m.gguf", model_type="qwen3")
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
            {"extra": [("rope.scaling.type", "ntk"), ("rope.scaling.factor", 2.0)]},
            "rotary type 'ntk' is not supported: the supported ones are default, linear",
        ),
        ({"extra": [("rope.scaling.type", "linear")]}, "rotary type 'linear' needs factor"),
        ({"extra": [("expert_count", 8)]}, "the metadata has no llama.expert_used_count"),
        ({"model_type": "gemma2", "tensors": {"blk.0.post_ffw_norm.weight": None}}, "lacks .*post_ffw_norm"),
        ({"model_type": "mixtral", "tensors": {"blk.1.ffn_up_exps.weight": None}}, "lacks .*experts.0.w3"),
        ({"extra": [("rope.dimension_count", 8.0)]}, "rope.dimension_count=8.0 is not the head size 16: llama"),
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


def test_unknown_architecture_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "llama", "mamba")
    monkeypatch.setattr("gguf_files._stored", lambda config, weights: {})
    write_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": np.ones((4, 4), np.float32)})
    message = f"general.architecture='mamba' is not supported: the supported ones are {', '.join(DIALECTS)}"
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "m.gguf")


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


@pytest.mark.parametrize("length", [2**22 + 1, 2**40, 2**63])
def test_damaged_length_of_a_list_is_refused_at_once(length, tmp_path):
    """Without a bound gguf's reader would take the rest of the file for entries, and then nothing, forever."""
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    key = b"tokenizer.ggml.scores"
    place = content.index(key) + len(key) + 4 + 4  # behind the kind of the value and of its entries
    assert int.from_bytes(content[place : place + 8], "little") == 4
    (tmp_path / "m.gguf").write_bytes(content[:place] + length.to_bytes(8, "little") + content[place + 8 :])
    with pytest.raises(ValueError, match=r"m.gguf is truncated, broken .*a list of \d+ entries in its metadata"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("count", [2**20, 2**63])
def test_damaged_counts_are_refused_at_once(count, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    for place in (8, 16):  # of tensors, of keys
        (tmp_path / "m.gguf").write_bytes(content[:place] + count.to_bytes(8, "little") + content[place + 8 :])
        with pytest.raises(ValueError, match=r"m.gguf is truncated, broken"):
            GGUFFile(tmp_path / "m.gguf")


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
