import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import CONFIGS, tiny_llama, tiny_model

from jaxvllm.models.checkpoint.loader import load_model, open_checkpoint, read_config
from jaxvllm.models.checkpoint.orbax_folder import OrbaxFolder, write_orbax
from jaxvllm.models.quantized import QuantizedWeight

ON_EIGHT_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from pathlib import Path
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxvllm.models.checkpoint.loader import load_model
from jaxvllm.models.checkpoint.orbax_folder import write_orbax

source, again, out = map(Path, sys.argv[1:])
mesh = jax.make_mesh((8,), ("chips",))

def rule(path, shape):
    return NamedSharding(mesh, P("chips", None) if len(shape) == 2 else P())

config, model = load_model(source, sharding=rule)
leaves = {}
for path, param in nnx.to_flat_state(nnx.state(model)):
    for part, array in jax.tree.leaves_with_path(param):
        assert len(array.sharding.device_set) == 8, path
        rows = {shard.data.shape[0] for shard in array.addressable_shards}
        split = path[-1] == "weight" and "norm" not in str(path)
        assert rows == {array.shape[0] // 8 if split else array.shape[0]}, (path, part, rows)
        leaves[".".join(map(str, path)) + jax.tree_util.keystr(part)] = np.asarray(array)
np.savez(out, **leaves)
write_orbax(again, config, model)
"""


def leaves_of(model) -> dict[str, np.ndarray]:
    leaves = {}
    for path, param in nnx.to_flat_state(nnx.state(model)):
        for part, array in jax.tree.leaves_with_path(param):
            leaves[".".join(map(str, path)) + jax.tree_util.keystr(part)] = np.asarray(array)
    return leaves


def assert_same(one: dict[str, np.ndarray], other):
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype or other[name].dtype.kind == "V"  # npz does not know bfloat16
        np.testing.assert_array_equal(value.view(np.uint8), other[name].view(np.uint8), err_msg=name)


def write(source: Path, folder: Path, **options):
    folder.mkdir()
    config, model = load_model(source, **options)
    write_orbax(folder, config, model)
    return config, model


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A source and its conversion; read only."""
    source = tiny_llama(tmp_path_factory.mktemp("source"), tokenizer=False, attention_bias=True)
    folder = tmp_path_factory.mktemp("converted") / "out"
    config, model = write(source, folder)
    return folder, config, model


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe"])  # rotary kinds per layer; experts
def test_config_and_weights_come_back_as_they_were(model_type, options, tmp_path):
    config, model = write(tiny_model(tmp_path / "source", model_type, tokenizer=False), tmp_path / "out", **options)
    assert isinstance(open_checkpoint(tmp_path / "out"), OrbaxFolder)
    assert read_config(tmp_path / "out") == config
    again_config, again = load_model(tmp_path / "out")
    assert again_config == config
    assert_same(leaves_of(model), leaves_of(again))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_config_of_every_architecture_survives_json(model_type, tmp_path):
    source = tiny_model(tmp_path / "source", model_type, tokenizer=False)
    config = read_config(source)
    (tmp_path / "out").mkdir()
    write_orbax(tmp_path / "out", config, load_model(source)[1])
    assert read_config(tmp_path / "out") == config


def test_dtype_and_int8_can_be_asked_for_at_load(converted):
    folder, _, model = converted
    config, narrow = load_model(folder, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    for name, value in leaves_of(model).items():
        np.testing.assert_array_equal(leaves_of(narrow)[name], value.astype(jnp.bfloat16))
    _, rounded = load_model(folder, quantization="int8")
    weight = rounded.layers[0].attention.o.weight[...]
    assert isinstance(weight, QuantizedWeight)
    np.testing.assert_allclose(
        weight.values * weight.scales[:, None],
        model.layers[0].attention.o.weight[...],
        atol=float(weight.scales.max()) / 2 * 1.001,
    )


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
def test_checkpoint_moves_between_one_device_and_eight(options, tmp_path):
    _, model = write(tiny_llama(tmp_path / "source", tokenizer=False), tmp_path / "one", **options)
    (tmp_path / "eight").mkdir()
    command = [sys.executable, "-W", "error", "-c", ON_EIGHT_DEVICES]
    paths = [str(tmp_path / name) for name in ("one", "eight", "seen.npz")]
    result = subprocess.run([*command, *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert_same(leaves_of(model), np.load(tmp_path / "seen.npz"))
    assert_same(leaves_of(model), leaves_of(load_model(tmp_path / "eight")[1]))


def change_marker(folder: Path, change):
    marker = json.loads((folder / "jaxvllm.json").read_text())
    change(marker)
    (folder / "jaxvllm.json").write_text(json.dumps(marker))


def add_layer(model: dict):
    """Makes a config's JSON that of a model with one layer more."""
    for name in ("ropes", "sliding_windows", "sparse_layers"):
        model[name].append(model[name][-1])
    model["num_layers"] += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: add_layer(m["model"]), r"lacks the tensors 'layers.3\.*"),
        (lambda m: m["model"].update(attention_bias=False), r"holds the tensors 'layers.0.attention.k.bias'.* llama"),
        (lambda m: m["model"].update(vocab_size=500), r"'embed.weight' is \[512, 64\].*makes it \[500, 64\]"),
        (lambda m: m["model"].update(model_type="nonesuch"), "model_type='nonesuch' is not supported"),
        (lambda m: m["model"].pop("head_dim"), r"jaxvllm.json: model lacks, or has too much: \['head_dim'\]"),
        (lambda m: m["model"].update(head_size=4), r"too much: \['head_size'\]"),
        (lambda m: m["model"].update(head_dim="16"), "head_dim='16' is no <class 'int'>"),
        (lambda m: m.update(format=2), "has the format 2, this version reads 1"),
        (lambda m: m.pop("model"), "model lacks, or has too much: everything"),
    ],
)
def test_what_does_not_fit_is_named(converted, change, message, tmp_path):
    folder = shutil.copytree(converted[0], tmp_path / "out")
    change_marker(folder, change)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_damaged_weights_are_named(converted, tmp_path):
    """In a process of its own: Orbax gives up at the first tensor that fails, and leaves its readers of the others to
    the garbage collector, whose complaints would come in some later test."""
    folder = shutil.copytree(converted[0], tmp_path / "out")
    largest = max((folder / "weights").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])
    gone = shutil.copytree(converted[0], tmp_path / "gone")
    shutil.rmtree(gone / "weights")
    code = """
import sys
from pathlib import Path
from jaxvllm.models.checkpoint.loader import load_model
for folder in sys.argv[1:]:
    try:
        load_model(Path(folder))
    except ValueError as error:
        print("refused:", error)
"""
    command = [sys.executable, "-c", code, str(folder), str(gone)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for path in (folder, gone):
        assert f"refused: {path / 'weights'} is damaged or incomplete" in done.stdout


def test_folder_without_its_marker_is_an_interrupted_conversion(converted, tmp_path):
    folder = shutil.copytree(converted[0], tmp_path / "out")
    (folder / "jaxvllm.json").unlink()
    with pytest.raises(ValueError, match="conversion that was interrupted: delete it"):
        load_model(folder)
