import re

import pytest
from flax import nnx
from tiny_models import LLAMA_CONFIG, QWEN3_CONFIG, tiny_llama, tiny_qwen3, tiny_weights

from jaxvllm.models import registry
from jaxvllm.models.loader import hf_names, read_config


@pytest.mark.parametrize(
    ("make", "config"), [(tiny_llama, LLAMA_CONFIG), (tiny_qwen3, QWEN3_CONFIG)], ids=["llama", "qwen3"]
)
def test_weight_map_names_every_parameter(make, config, tmp_path):
    architecture = registry.resolve(config["model_type"])
    model_config = read_config(make(tmp_path, tokenizer=False))
    state = nnx.state(nnx.eval_shape(lambda: architecture.make(model_config)))
    shapes = {".".join(map(str, path)): param.shape for path, param in nnx.to_flat_state(state)}
    names = hf_names(shapes, architecture.weights)
    expected = {name: value.shape for name, value in tiny_weights(config).items()}
    assert {names[path]: shape for path, shape in shapes.items()} == expected


def test_layer_number_goes_to_the_place_of_the_star():
    weights = {"model.layers.*.w.weight": "layers.*.w.weight", "top.weight": "top.weight"}
    paths = ["layers.12.w.weight", "top.weight"]
    assert hf_names(paths, weights) == {
        "layers.12.w.weight": "model.layers.12.w.weight",
        "top.weight": "top.weight",
    }


def test_unknown_architecture_is_refused_with_the_list():
    with pytest.raises(ValueError, match=re.escape("'gpt2' is not supported: the supported ones are llama, qwen3.")):
        registry.resolve("gpt2")
