"""models/config.py: fault case 11 and its kind, on config.json files as they are in the wild."""

import json
import subprocess
import sys

import pytest
from tiny_models import ABSENT, tiny_llama, tiny_qwen3

from jaxvllm.models.loader import read_config
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
from jaxvllm.models.loader import read_config
assert read_config(Path({str(path)!r})).model_type == "llama"
import_transformers().AutoTokenizer.from_pretrained({str(path)!r})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr
