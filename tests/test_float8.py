"""Float8 checkpoints: written block by block, row by row or whole, and read back as what they stand for."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_llama

from jaxvllm.models.checkpoint.float8 import Float8, dequantize, read_float8
from jaxvllm.models.checkpoint.loader import load_model

E4M3 = np.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0  # of E4M3
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}


def to_float8(folder: Path, quantization: dict, suffix: str, block: tuple[int, int]) -> dict[str, np.ndarray]:
    """Rewrites the layers' matrices as float8, a scale per block; returns what all tensors stand for."""
    stored, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = expected[name] = weight
        if "_proj.weight" in name:
            outputs, inputs = (min(part, size) for part, size in zip(block, weight.shape, strict=True))
            scale = np.zeros([-(-size // part) for size, part in zip(weight.shape, (outputs, inputs), strict=True)])
            values = np.zeros(weight.shape, np.float32)
            for i, j in np.ndindex(*scale.shape):
                at = (slice(i * outputs, (i + 1) * outputs), slice(j * inputs, (j + 1) * inputs))
                scale[i, j] = np.float32(np.abs(weight[at]).max() / LARGEST)
                values[at] = weight[at] / scale[i, j]
            stored[name] = values.astype(E4M3)
            stored[f"{name}{suffix}"] = scale.astype(np.float32)
            spread = scale.repeat(outputs, 0).repeat(inputs, 1)[: weight.shape[0], : weight.shape[1]]
            expected[name] = stored[name].astype(np.float32) * spread.astype(np.float32)
    save_as(folder, stored)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return expected


def save_as(folder: Path, tensors: dict[str, np.ndarray]):
    save_file(tensors, folder / "model.safetensors")


def change(folder: Path, changes: dict):
    """Replaces tensors; None drops one. The library reads no float8 into numpy, so the file is edited as bytes."""
    tensors = load_float8(folder / "model.safetensors")
    save_as(folder, {name: value for name, value in (tensors | changes).items() if value is not None})


def load_float8(file: Path) -> dict[str, np.ndarray]:
    kinds = {"F32": np.float32, "F8_E4M3": E4M3}
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return {
        name: np.frombuffer(content[8 + size :][slice(*of["data_offsets"])], kinds[of["dtype"]]).reshape(of["shape"])
        for name, of in header.items()
        if name != "__metadata__"
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny_llama(tmp_path / "model", tokenizer=False)


@pytest.mark.parametrize(
    ("quantization", "suffix", "block"),
    [
        (FP8, "_scale_inv", (24, 40)),  # divides neither side of any matrix
        (FP8 | {"weight_block_size": None}, "_scale", (999, 999)),
        (CHANNELS, "_scale", (1, 999)),
    ],
    ids=["blocks", "tensor", "channels"],
)
def test_weights_come_back_as_what_they_stand_for(quantization, suffix, block, folder):
    expected = to_float8(folder, quantization, suffix, block)
    config, model = load_model(folder)
    assert config.dtype == "float32"
    assert model.head is not None
    for i, layer in enumerate(model.layers):
        assert layer.mlp is not None
        for name, module in (
            ("self_attn.k", layer.attention.k),
            ("mlp.up", layer.mlp.up),
            ("mlp.down", layer.mlp.down),
        ):
            np.testing.assert_array_equal(module.weight[...], expected[f"model.layers.{i}.{name}_proj.weight"])
    np.testing.assert_array_equal(model.head.weight[...], expected["lm_head.weight"])

    _, narrow = load_model(folder, dtype="bfloat16")
    wide = expected["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(narrow.layers[0].attention.o.weight[...], wide.astype(jnp.bfloat16))


def test_scale_of_an_input_is_no_surplus(folder):
    to_float8(folder, FP8, "_scale_inv", (24, 40))
    change(folder, {"model.layers.0.mlp.up_proj.input_scale": np.ones(1, np.float32)})
    load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight_scale_inv": None},
            r"'model.layers.1.mlp.up_proj.weight' is F8_E4M3 and has no scale: .*up_proj.weight_scale_inv or",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight_scale_inv": np.ones((3, 3), np.float32)},
            r"'model.layers.1.mlp.up_proj.weight' is F8_E4M3: a scale of \[3, 3\] does not fit \[160, 64\] and blocks",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight_scale_inv": np.full(1, np.nan, np.float32)},
            r"'model.layers.1.mlp.up_proj.weight' is F8_E4M3: its scales are not all finite",
        ),
        ({"model.norm.weight_scale_inv": np.ones(1, np.float32)}, "holds the tensor 'model.norm.weight_scale_inv'"),
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks the tensor 'model.layers.1.mlp.up_proj.weight'"),
    ],
)
def test_scale_that_is_missing_or_does_not_fit_is_named(changes, message, folder):
    to_float8(folder, FP8, "_scale_inv", (24, 40))
    change(folder, changes)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_float8_of_an_unquantised_config_is_named(folder):
    to_float8(folder, {}, "_scale_inv", (24, 40))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is F8_E4M3, and config.json has no quantization_config"):
        load_model(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("gptq", r"quantised weights \(gptq\) are not supported"),
        ({}, r"quantised weights \(None\)"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\] is not two"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "is not two positive"),
        ({"quant_method": "compressed-tensors"}, "config_groups with 0 kinds of blocks"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}},
            r"compressed-tensors, int of 4 bits",
        ),
    ],
)
def test_other_kinds_are_refused_by_name(quantization, message):
    with pytest.raises(ValueError, match=message):
        read_float8(quantization)


def test_rows_are_dequantised_in_pieces_as_in_one():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((2500, 7)).astype(E4M3)
    scale = rng.uniform(1, 2, (25, 2)).astype(np.float32)
    expected = weight.astype(np.float32) * scale.repeat(100, 0).repeat(4, 1)[:, :7]
    got = dequantize(weight, scale, Float8(block=(100, 4)), np.dtype(np.float32))
    np.testing.assert_array_equal(got, expected)
