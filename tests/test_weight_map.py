from types import SimpleNamespace

import numpy as np
import pytest

from jaxvllm.models.weight_map import Source, find_sources

WEIGHTS = {
    "top.weight": "top.weight",
    "model.layers.*.w.weight": "layers.*.w.weight",
    "model.layers.*.qkv.weight": ("layers.*.q.weight", "layers.*.k.weight"),
    "model.layers.*.experts.*.up.weight": "layers.*.experts.up.weight",
}


def find(shapes, stored=(), rename=str):
    stored_shapes = dict.fromkeys(stored, ())
    return find_sources(shapes, WEIGHTS, SimpleNamespace(shapes=stored_shapes, stored_name=rename))


def read(source, shapes, tensors):
    asked = []
    found = dict(source.read(shapes, lambda name: asked.append(name) or tensors[name]))
    assert asked == list(source.names), "each stored tensor is read once"
    return found


def test_the_layers_number_goes_to_the_place_of_the_star():
    sources = find({"layers.12.w.weight": (4, 2), "top.weight": (3,)})
    assert sources == [
        Source(("model.layers.12.w.weight",), ("layers.12.w.weight",)),
        Source(("top.weight",), ("top.weight",)),
    ]


def test_a_checkpoint_may_store_it_under_another_name():
    [source] = find({"layers.0.w.weight": (4, 2)}, rename=lambda name: f"stored.{name}")
    assert source.names == ("stored.model.layers.0.w.weight",)


def test_rows_of_a_fused_tensor_are_split_in_their_order():
    shapes = {"layers.0.k.weight": (2, 5), "layers.0.q.weight": (4, 5)}
    [source] = find(shapes)
    assert source.stored_shapes(shapes) == {"model.layers.0.qkv.weight": (6, 5)}
    fused = np.arange(30).reshape(6, 5)
    found = read(source, shapes, {"model.layers.0.qkv.weight": fused})
    np.testing.assert_array_equal(found["layers.0.q.weight"], fused[:4])
    np.testing.assert_array_equal(found["layers.0.k.weight"], fused[4:])


def test_experts_are_stacked_in_the_order_of_their_numbers():
    shapes = {"layers.3.experts.up.weight": (11, 2, 5)}
    [source] = find(shapes)
    names = [f"model.layers.3.experts.{i}.up.weight" for i in range(11)]
    assert source.stored_shapes(shapes) == dict.fromkeys(names, (2, 5))
    found = read(source, shapes, {name: np.full((2, 5), i) for i, name in enumerate(names)})
    assert (found["layers.3.experts.up.weight"][:, 0, 0] == np.arange(11)).all()


def test_experts_that_are_stored_as_a_stack_are_taken_so():
    shapes = {"layers.3.experts.up.weight": (2, 2, 5)}
    name = "model.layers.3.experts.up.weight"
    [source] = find(shapes, stored=[name])
    assert source.stored_shapes(shapes) == {name: (2, 2, 5)}
    stack = np.arange(20).reshape(2, 2, 5)
    np.testing.assert_array_equal(read(source, shapes, {name: stack})["layers.3.experts.up.weight"], stack)


def test_a_parameter_that_the_map_does_not_name_is_our_bug():
    with pytest.raises(KeyError):
        find({"layers.0.unknown.weight": (1,)})
