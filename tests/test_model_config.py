"""models/config.py: fault case 11 and its kind, on config.json files as they are in the wild."""

import json
import math
import subprocess
import sys

import pytest
from tiny_models import ABSENT, tiny_llama, tiny_model, tiny_qwen3

from jaxvllm.models.checkpoint.loader import read_config
from jaxvllm.models.config import ExpertsConfig
from jaxvllm.models.rope import RopeConfig

DEFAULT = RopeConfig(rope_type="default", theta=10000.0)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": None}, DEFAULT),
        ({"rope_scaling": ABSENT}, DEFAULT),
        ({"rope_scaling": ABSENT, "rope_theta": ABSENT}, DEFAULT),
        ({"rope_scaling": {"rope_type": "default"}}, DEFAULT),
        ({"rope_scaling": {"type": "default"}}, DEFAULT),
        ({"rope_scaling": ABSENT, "rope_theta": 5e5}, RopeConfig(rope_type="default", theta=5e5)),
        (
            {
                "rope_scaling": ABSENT,
                "rope_theta": ABSENT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 7e3},
            },
            RopeConfig(rope_type="default", theta=7e3),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig(rope_type="linear", theta=10000.0, factor=4.0),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            RopeConfig(rope_type="dynamic", theta=10000.0, factor=2.0),
        ),
    ],
)
def test_every_spelling_of_rotary_parameters_is_read(changes, rope, tmp_path):
    path = tiny_llama(tmp_path, tokenizer=False, **changes)
    before = (path / "config.json").read_text()
    assert set(read_config(path).ropes) == {rope}
    assert (path / "config.json").read_text() == before


def test_rotary_parameters_nested_by_layer_type_are_read_where_all_layers_share_them(tmp_path):
    parameters = {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}
    nested = {"full_attention": parameters, "sliding_attention": dict(parameters)}
    path = tiny_qwen3(tmp_path, tokenizer=False, rope_parameters=nested)
    assert set(read_config(path).ropes) == {RopeConfig(rope_type="linear", theta=2e4, factor=2.0)}

    nested["sliding_attention"]["factor"] = 3.0
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ropes = read_config(tiny_qwen3(tmp_path, tokenizer=False, rope_parameters=nested, **window)).ropes
    assert [rope.factor for rope in ropes if rope] == [2.0, 3.0]


LOCAL, GLOBAL = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},  # transformers 4: rope_theta, rope_local_base_freq, rope_scaling, sliding_window_pattern
        {
            "rope_theta": ABSENT,
            "rope_local_base_freq": ABSENT,
            "rope_scaling": ABSENT,
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL},
        },
        {
            "sliding_window_pattern": ABSENT,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ],
)
def test_both_spellings_of_gemma_3_are_one_config(changes, tmp_path):
    config = read_config(tiny_model(tmp_path, "gemma3_text", tokenizer=False, **changes))
    local = RopeConfig(rope_type="default", theta=1e4)
    assert config.ropes == (local, local, RopeConfig(rope_type="linear", theta=1e6, factor=8.0))
    assert config.sliding_windows == (24, 24, None)
    assert config.attention_scale == 24**-0.5
    assert config.hidden_act == "gelu_pytorch_tanh"


def test_what_published_gemma_configs_leave_out_is_what_transformers_says(tmp_path):
    """The pattern of windows, both rotary bases and Gemma 2's soft caps have defaults in transformers' classes."""
    left_out = dict.fromkeys(("sliding_window_pattern", "rope_theta", "rope_local_base_freq", "rope_scaling"), ABSENT)
    config = read_config(tiny_model(tmp_path, "gemma3_text", tokenizer=False, num_hidden_layers=7, **left_out))
    assert config.sliding_windows == (24, 24, 24, 24, 24, None, 24)
    assert [rope.theta for rope in config.ropes if rope] == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4]
    left_out = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ABSENT)
    config = read_config(tiny_model(tmp_path, "gemma2", tokenizer=False, num_hidden_layers=3, **left_out))
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert config.sliding_windows == (24, None, 24)


@pytest.mark.parametrize(("window", "expected"), [(24, (24, 24)), (None, (None, None))])
def test_mistrals_window_is_of_every_layer(window, expected, tmp_path):
    path = tiny_model(tmp_path, "mistral", tokenizer=False, sliding_window=window)
    assert read_config(path).sliding_windows == expected


@pytest.mark.parametrize(
    "changes",
    [{}, {"no_rope_layers": [1, 1, 0], "no_rope_layer_interval": ABSENT}, {"no_rope_layers": [1, 1, 0, 1, 1]}],
)
def test_layers_of_smollm3_without_rotary_embedding(changes, tmp_path):
    assert read_config(tiny_model(tmp_path, "smollm3", tokenizer=False, **changes)).ropes == (DEFAULT, DEFAULT, None)


@pytest.mark.parametrize("kind", ["longrope", "yarn"])  # Phi-3 has called its longrope so too
def test_longrope_of_phi_3_is_read_with_the_share_of_each_head(kind, tmp_path):
    scaling = {"type": kind, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = read_config(
        tiny_model(
            tmp_path,
            "phi3",
            tokenizer=False,
            original_max_position_embeddings=128,
            partial_rotary_factor=0.5,
            rope_scaling=scaling,
        )
    )
    [rope] = set(config.ropes)
    assert rope is not None
    assert (rope.rope_type, rope.rotary_share, rope.original_max_position_embeddings) == ("longrope", 0.5, 128)
    assert rope.long_divisors == (2.0,) * 4
    assert rope.attention_factor == pytest.approx((1 + math.log(512 / 128) / math.log(128)) ** 0.5)


def test_mixtures_of_experts_are_read_as_each_architecture_spells_them(tmp_path):
    config = read_config(tiny_model(tmp_path / "a", "qwen3_moe", tokenizer=False, norm_topk_prob=False))
    assert config.experts == ExpertsConfig(
        num_experts=8,
        num_experts_per_token=3,
        intermediate_size=48,
        shared_intermediate_size=None,
        normalize_weights=False,
    )
    assert config.sparse_layers == (True, False, True)
    every_second = {"decoder_sparse_step": 2, "mlp_only_layers": ABSENT}
    config = read_config(tiny_model(tmp_path / "b", "qwen3_moe", tokenizer=False, **every_second))
    assert config.sparse_layers == (False, True, False)
    config = read_config(tiny_model(tmp_path / "c", "mixtral", tokenizer=False))
    assert config.experts == ExpertsConfig(
        num_experts=4,
        num_experts_per_token=2,
        intermediate_size=96,
        shared_intermediate_size=None,
        normalize_weights=True,
    )
    assert config.sparse_layers == (True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_token": 9}, "9 experts per token of 8"),
        ({"intermediate_size": -1}, "intermediate_size=-1"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size=-1"),
    ],
)
def test_expert_counts_that_contradict_are_refused(changes, message):
    values = {"num_experts": 8, "num_experts_per_token": 2, "intermediate_size": 16}
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**values | {"shared_intermediate_size": None, "normalize_weights": True} | changes)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    path = tiny_model(tmp_path, "gemma3_text", tokenizer=False, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        read_config(path)


@pytest.mark.parametrize("rope_type", ["proportional", "mrope", "ntk"])
def test_unknown_rotary_type_is_refused_by_name(rope_type, tmp_path):
    path = tiny_llama(tmp_path, tokenizer=False, rope_scaling={"rope_type": rope_type, "factor": 2.0})
    with pytest.raises(ValueError, match=rf"config\.json.*{rope_type}"):
        read_config(path)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ABSENT, "dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype_is_read_in_both_spellings(changes, dtype, tmp_path):
    path = tiny_llama(tmp_path, tokenizer=False)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    assert read_config(path).dtype == dtype


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_without_a_dtype_that_of_the_weights_is_taken(stored, tmp_path):
    path = tiny_llama(tmp_path, tokenizer=False, torch_dtype=stored)
    config = json.loads((path / "config.json").read_text())
    del config["torch_dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert read_config(path).dtype == stored


def test_absent_values_get_the_defaults_of_transformers(tmp_path):
    absent = dict.fromkeys(
        (
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
        ),
        ABSENT,
    )
    (tmp_path / "weights").mkdir()
    path = tiny_llama(tmp_path / "weights", tokenizer=False)
    config = json.loads((path / "config.json").read_text()) | absent | {"max_position_embeddings": ABSENT}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    found = read_config(path)
    assert (found.num_kv_heads, found.head_dim, found.rms_norm_eps) == (4, 16, 1e-6)
    assert (found.tie_word_embeddings, found.attention_bias, found.mlp_bias) == (False, False, False)
    assert found.max_position_embeddings == 2048


def test_sliding_window_is_per_layer(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    assert read_config(tiny_qwen3(tmp_path, tokenizer=False, **window)).sliding_windows == (None, 24)
    off = window | {"use_sliding_window": False}
    assert read_config(tiny_qwen3(tmp_path, tokenizer=False, **off)).sliding_windows == (None, None)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "ends"),
    [(5, [7, 9], {5, 7, 9}), ([5, 6], 5, {5, 6}), (None, 9, {9}), (5, None, {5}), (None, None, set())],
)
def test_end_ids_are_the_union_of_both_files(in_config, in_generation_config, ends, tmp_path):
    path = tiny_llama(tmp_path, tokenizer=False, eos_token_id=in_config)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    assert read_config(path).eos_token_ids == ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported: the supported ones are .*llama, .*qwen3"),
        ({"model_type": ABSENT}, "'missing' is not supported"),
        ({"hidden_act": "gelu"}, r"config\.json: hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"config\.json: quantised weights \(awq\)"),
        ({"num_key_value_heads": 3}, r"config\.json: num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"hidden_size": "many"}, r"config\.json"),
        ({"num_attention_heads": 0}, r"config\.json"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"model_type": ["llama"]}, r"model_type=.*llama.* is not supported"),
        ({"quantization_config": "gptq"}, r"quantised weights \(gptq\)"),
    ],
)
def test_what_the_layers_cannot_do_is_refused_by_name(changes, message, tmp_path):
    path = tiny_llama(tmp_path, tokenizer=False)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    with pytest.raises(ValueError, match=message):
        read_config(path)


@pytest.mark.parametrize("content", ["", '{"model_type": "llama"', "[1, 2]", "[" * 100_000])
def test_broken_config_file_is_named(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_torch_is_not_imported_even_where_it_is_installed(tmp_path):
    (tmp_path / "site/torch").mkdir(parents=True)
    (tmp_path / "site/torch/__init__.py").write_text("raise RuntimeError('torch was imported')")
    (tmp_path / "site/torch-2.13.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
    (tmp_path / "site/torch-2.13.0.dist-info/METADATA").write_text(metadata)
    path = tiny_llama(tmp_path / "model")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from pathlib import Path
from jaxvllm.models.config import import_transformers
from jaxvllm.models.config import ExpertsConfig
from jaxvllm.models.checkpoint.loader import read_config
assert read_config(Path({str(path)!r})).model_type == "llama"
import_transformers().AutoTokenizer.from_pretrained({str(path)!r})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr
