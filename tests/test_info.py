import json

import huggingface_hub
import jax
import pytest
from click.testing import CliRunner
from flax import nnx
from gguf_files import write_gguf
from tiny_models import tiny_llama, tiny_qwen3

from jaxvllm.aot.info import chip_names, describe, fits
from jaxvllm.cli import main
from jaxvllm.convert import convert
from jaxvllm.models.checkpoint.loader import load_model, read_config, resolve_path

QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    "max_position_embeddings": 40960, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A folder with a config and no weights."""
    path = tiny_llama(tmp_path / "model")
    (path / "model.safetensors").unlink()
    return path


def large(tmp_path):
    """The config of Qwen3-8B; its weights are nowhere."""
    path = tiny_qwen3(tmp_path / "large", tokenizer=False)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | QWEN3_8B))
    return path


def run(*arguments):
    return CliRunner().invoke(main, ["info", *map(str, arguments)])


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_counts_are_those_of_the_loaded_model(make, options, tmp_path):
    config, model = load_model(make(tmp_path, tokenizer=False), **options)
    about = describe(config, **options)
    leaves = jax.tree.leaves(nnx.state(model))
    assert about.weight_bytes == sum(leaf.nbytes for leaf in leaves)
    if not options:
        assert about.num_parameters == sum(leaf.size for leaf in leaves)


def test_size_of_qwen3_8b_is_the_published_one(tmp_path):
    about = describe(read_config(large(tmp_path)))
    assert about.num_parameters == 8_190_735_360
    assert about.weight_bytes == 2 * 8_190_735_360


def test_blocks_fill_what_the_weights_leave(tmp_path):
    about = describe(read_config(large(tmp_path)))
    by_chip = {fit.chip: fit for fit in fits(about, chip_names(), length=4096, block_size=16)}
    assert {"v5e", "v6e", "v5p", "tpu7x", "h100", "h200", "a100"} <= by_chip.keys()
    assert {fit.kv_bytes_per_token for fit in by_chip.values()} == {36 * 2 * 8 * 128 * 2}
    v6e = by_chip["v6e"]
    assert v6e.num_blocks == (int(0.8 * 32e9) - 2 * 8_190_735_360) // (16 * v6e.kv_bytes_per_token)
    assert v6e.num_seqs == v6e.num_blocks // 256
    assert (by_chip["v5e"].num_seqs, by_chip["v5e"].least_chips) == (0, 2)
    assert by_chip["h200"].num_seqs > by_chip["h100"].num_seqs > by_chip["v6e"].num_seqs
    assert (by_chip["v5e"].backend, by_chip["h100"].backend, by_chip["a100"].backend) == ("tpu", "gpu", "xla")


def test_kv_bytes_are_the_padded_ones_of_the_backend(folder):
    """Heads of 16 take 64 in the TPU's tiles, and 16 on a GPU that the kernels are not for."""
    tpu, gpu = fits(describe(read_config(folder)), ["v5e", "a100"], length=100, block_size=16)
    assert tpu.kv_bytes_per_token == 3 * 2 * 2 * 64 * 4
    assert gpu.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_command_describes_a_folder_without_weights(folder):
    result = run(folder, "--chip", "v5e", "--chip", "h100", "--length", 9999)
    assert result.exit_code == 0, result.output
    assert "llama, 3 layers, 4 query and 2 KV heads of 16, hidden 64" in result.output
    assert "195,008" in result.output
    assert "sequences of 512 tokens" in result.output  # what the model was made for
    assert [line.split()[0] for line in result.stdout.splitlines()[-2:]] == ["v5e", "h100"]


def test_command_says_how_many_chips_a_large_model_takes(tmp_path):
    result = run(large(tmp_path), "--chip", "v5e")
    assert result.stdout.endswith("does not fit: weights and one sequence are what 2 chips hold\n")
    assert "9.44 GB in bfloat16, the layers' products in int8" in run(large(tmp_path), "--quantization", "int8").stdout


def test_command_describes_gguf_files_and_conversions(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    assert "llama, 3 layers" in run(tmp_path / "m.gguf").stdout
    convert(str(tiny_llama(tmp_path / "source")), tmp_path / "out", quantization="int8")
    assert "in float32, the layers' products in int8" in run(tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "nonesuch"}, "Error: model_type='nonesuch' is not supported: the supported ones are"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rotary type 'spiral' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights (awq) are not supported"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ],
)
def test_command_says_why_a_model_is_refused(change, reason, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    result = run(folder)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_command_checks_the_tensors_where_there_are_any(tmp_path):
    folder = tiny_llama(tmp_path, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    result = run(folder)
    assert result.exit_code == 1
    assert "lacks the tensors 'model.layers.2.self_attn.k_proj.weight'" in result.stderr


def test_unknown_chip_is_refused_with_those_there_are(folder):
    assert "chip 'v9' is none of v5e, v5p, v6e, tpu7x, a100, b200, h100, h200." in run(folder, "--chip", "v9").stderr


def test_configs_only_come_from_the_hub(folder, monkeypatch):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, **options: asked.update(options) or str(folder))
    assert resolve_path("some-org/Some-Model", weights=False) == folder
    assert asked["allow_patterns"] == ["config.json", "generation_config.json"]
