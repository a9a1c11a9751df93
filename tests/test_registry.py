import re
from pathlib import Path

import pytest
from flax import nnx
from tiny_models import CONFIGS, tiny_model, tiny_weights

from jaxvllm.models import registry
from jaxvllm.models.checkpoint.loader import read_config
from jaxvllm.models.checkpoint.weight_map import find_sources


@pytest.mark.parametrize("model_type", CONFIGS)
def test_weight_map_names_every_parameter(model_type, tmp_path):
    architecture = registry.resolve(model_type)
    model_config = read_config(tiny_model(tmp_path, model_type, tokenizer=False))
    state = nnx.state(nnx.eval_shape(lambda: architecture.make(model_config)))
    shapes = {".".join(map(str, path)): param.shape for path, param in nnx.to_flat_state(state)}
    stored = {name: value.shape for name, value in tiny_weights(CONFIGS[model_type]).items()}
    sources = find_sources(shapes, architecture.weights, stored)
    expected = [item for source in sources for item in source.stored_shapes(shapes).items()]
    assert sorted(expected) == sorted(stored.items())


def test_every_architecture_has_its_row_in_the_documents():
    page = (Path(__file__).parents[1] / "docs/models.md").read_text()
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "`" in line[3:]}
    assert rows - {"model_type"} == set(registry.ARCHITECTURES)


def test_unknown_architecture_is_refused_with_the_list():
    message = f"'gpt2' is not supported: the supported ones are {', '.join(sorted(registry.ARCHITECTURES))}."
    with pytest.raises(ValueError, match=re.escape(message)):
        registry.resolve("gpt2")
