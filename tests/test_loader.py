import json
import shutil
import struct
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_llama, tiny_qwen3

from jaxvllm.models import registry
from jaxvllm.models.checkpoint.loader import load_model, resolve_path
from jaxvllm.models.checkpoint.weight_map import find_sources

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_llama(tmp_path / "model", tokenizer=False)


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def split_into_shards(folder: Path) -> list[Path]:
    """Replaces the one file by two, each holding every other tensor, and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[i::2]}, folder / file)
        weight_map |= dict.fromkeys(names[i::2], file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("*.safetensors"))


def weights_of(model) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in flat}


def assert_holds(model, stored: dict[str, np.ndarray]):
    weights = weights_of(model)
    shapes = {path: value.shape for path, value in weights.items()}
    stored_shapes = {name: value.shape for name, value in stored.items()}
    sources = find_sources(shapes, registry.resolve(model.config.model_type).weights, stored_shapes)
    assert sorted(name for source in sources for name in source.names) == sorted(stored)
    for source in sources:
        for path, value in source.read(shapes, stored.__getitem__):
            np.testing.assert_array_equal(weights[path], value)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_arrives_unchanged_in_its_own_dtype(make, dtype, tmp_path):
    folder = make(tmp_path, tokenizer=False, dtype=dtype, torch_dtype=dtype)
    config, model = load_model(folder)
    assert config.dtype == dtype
    assert_holds(model, load_file(folder / "model.safetensors"))
    assert {value.dtype.name for value in weights_of(model).values()} == {dtype}


def test_biases_are_loaded(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=False, attention_bias=True, mlp_bias=True)
    assert_holds(load_model(folder)[1], load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_asked_for_is_the_dtype_loaded(dtype, folder):
    config, model = load_model(folder, dtype=dtype)
    assert config.dtype == dtype
    stored = load_file(folder / "model.safetensors")
    assert_holds(model, {name: value.astype(jnp.dtype(dtype)) for name, value in stored.items()})


def test_unknown_dtype_is_refused(folder):
    with pytest.raises(ValueError, match="dtype='int4' is none of float32, bfloat16, float16"):
        load_model(folder, dtype="int4")


def test_only_the_shards_that_the_index_names_are_read(folder, caplog):
    stored = load_file(folder / "model.safetensors")
    split_into_shards(folder)
    (folder / "consolidated.safetensors").write_bytes(b"another file, and a broken one")
    assert_holds(load_model(folder)[1], stored)
    assert "consolidated.safetensors is not read" in caplog.text  # neither taken nor passed over in silence


def test_a_stray_shard_is_refused_by_name(folder):
    split_into_shards(folder)
    shutil.copy(next(folder.glob("model-*.safetensors")), folder / "model-00003-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"model-00003-of-00002\.safetensors is a shard that .* does not name"):
        load_model(folder)


def test_each_weight_goes_where_the_sharding_rule_says(folder):
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)
    asked = {}

    def rule(path, shape):
        asked[path] = shape
        return place

    _, model = load_model(folder, sharding=rule)
    assert asked == {path: value.shape for path, value in weights_of(model).items()}
    assert model.layers[0].attention.q.weight[...].sharding == place


def test_tied_head_is_the_embedding_whether_or_not_a_head_is_saved(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=False, tie_word_embeddings=True)
    _, model = load_model(folder)
    hidden = jnp.ones((1, 64))
    scores = model.logits(hidden)
    np.testing.assert_allclose(scores[0], model.embed.weight[...].sum(axis=1), rtol=1e-5, atol=1e-5)

    change_tensors(folder, lambda t: t.update({"lm_head.weight": np.zeros((512, 64), np.float32)}))
    np.testing.assert_array_equal(load_model(folder)[1].logits(hidden), scores)


def test_untied_head_is_used_and_its_absence_is_an_error(folder):
    _, model = load_model(folder)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    np.testing.assert_allclose(model.logits(jnp.ones((1, 64)))[0], head.sum(axis=1), rtol=1e-5, atol=1e-4)

    change_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lacks the tensor 'lm_head.weight'.*tie_word_embeddings"):
        load_model(folder)


def test_saved_rotary_buffers_are_ignored(folder):
    def add(tensors):
        tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    change_tensors(folder, add)
    load_model(folder)


def test_missing_tensors_are_named(folder):
    change_tensors(folder, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"model lacks the tensor 'model.layers.2.mlp.up_proj.weight'\."):
        load_model(folder)


def test_many_missing_tensors_are_counted(folder):
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"lacks the tensors 'model.layers.3.* and 13 more\."):
        load_model(folder)


def test_surplus_tensors_are_named(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}))
    with pytest.raises(ValueError, match=r"holds the tensor 'model.layers.0.self_attn.q_norm.weight'.* llama"):
        load_model(folder)


def test_misshaped_tensor_is_named_with_both_shapes(folder):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)}))
    with pytest.raises(ValueError, match=r"'model.norm.weight' is \[63\], but the config makes it \[64\]"):
        load_model(folder)


def test_tensor_of_a_dtype_that_is_no_weight_is_named(folder):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(64, np.int32)}))
    with pytest.raises(ValueError, match=r"'model.norm.weight' is I32, which is none of F32, F16, BF16"):
        load_model(folder)


def test_missing_shard_is_named(folder):
    shards = split_into_shards(folder)
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is missing"):
        load_model(folder)


def test_shard_without_a_tensor_of_the_index_is_named(folder):
    shards = split_into_shards(folder)
    tensors = load_file(shards[0])
    name = min(tensors)
    del tensors[name]
    save_file(tensors, shards[0])
    with pytest.raises(ValueError, match=rf"model-00001-of-00002.safetensors lacks '{name}'"):
        load_model(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1], ids=str)
def test_truncated_file_is_named(kept, folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or broken"):
        load_model(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"no JSON",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32"}}',
    ],
)
def test_broken_header_is_named(header, folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or broken"):
        load_model(folder)


@pytest.mark.parametrize("weight_map", [{}, [], {"a": 5}, {"a": None}, {"a": "../x.safetensors"}])
def test_index_that_names_no_files_is_refused(folder, weight_map):
    split_into_shards(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index.json has no weight_map"):
        load_model(folder)


def test_shards_without_an_index_are_refused(folder):
    split_into_shards(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match="holds 2 safetensors files and no"):
        load_model(folder)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no safetensors file"):
        load_model(folder)


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_model(tmp_path / "absent")


def no_network(*args, **kwargs):
    raise AssertionError("the network was asked")


def test_existing_path_never_asks_the_network(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.chdir(folder.parent)
    assert resolve_path(str(folder)) == folder
    assert resolve_path("model") == Path("model")  # a folder of the name comes before the hub


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/model", "~/absent-model", "absent.gguf", "a/b/c", "two words", ""]
)
def test_absent_path_is_refused_without_asking_the_network(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ValueError, match=r"does not exist: give a folder, a \.gguf file, or a hub name"):
        resolve_path(name)


def test_hub_name_downloads_what_a_model_needs(folder, monkeypatch):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_path("some-org/Some-Model-0.1B") == folder
    assert asked["repo_id"] == "some-org/Some-Model-0.1B"
    wanted = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
         "tokenizer.model", "chat_template.jinja", "pytorch_model.bin", "original/consolidated.safetensors",
         "consolidated.safetensors", "onnx/model.onnx", "README.md", "model.gguf"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )  # fmt: skip
    assert list(wanted) == [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer.model", "chat_template.jinja",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network\nand more"), ConnectionError("offline")])
def test_unreachable_hub_says_what_to_do(error, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match=r"'Qwen/Qwen3-0.6B' is no folder or file here.*Check the name and the network"):
        resolve_path("Qwen/Qwen3-0.6B")
    assert issubclass(GatedRepoError, OSError)  # the hub's refusals take the same way
