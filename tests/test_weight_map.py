import numpy as np
import pytest

from jaxvllm.models.checkpoint.weight_map import Source, find_sources

WEIGHTS = {
    "top.weight": "top.weight",
    "model.layers.*.w.weight": "layers.*.w.weight",
    "model.layers.*.qkv.weight": ("layers.*.q.weight", "layers.*.k.weight"),
    "model.layers.*.experts.*.up.weight": "layers.*.experts.up.weight",
}


def find(shapes, stored=(), **options):
    return find_sources(shapes, WEIGHTS, dict.fromkeys(stored, ()), **options)


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
    [source] = find({"layers.0.w.weight": (4, 2)}, stored_name=lambda name: f"stored.{name}")
    assert source.names == ("stored.model.layers.0.w.weight",)


def test_rows_of_a_fused_tensor_are_split_in_their_order():
    shapes = {"layers.0.k.weight": (2, 5), "layers.0.q.weight": (4, 5)}
    [source] = find(shapes)
    assert source.stored_shapes(shapes) == {"model.layers.0.qkv.weight": (6, 5)}
    fused = np.arange(30).reshape(6, 5)
    found = read(source, shapes, {"model.layers.0.qkv.weight": fused})
    np.testing.assert_array_equal(found["layers.0.q.weight"], fused[:4])
    np.testing.assert_array_equal(found["layers.0.k.weight"], fused[4:])


def test_experts_are_stacked_in_the_order_of_their_numbers_each_transposed():
    shapes = {"layers.3.experts.up.weight": (11, 5, 2)}
    [source] = find(shapes)
    tensors = {f"model.layers.3.experts.{i}.up.weight": np.arange(10).reshape(2, 5) + 10 * i for i in range(11)}
    assert source.stored_shapes(shapes) == dict.fromkeys(tensors, (2, 5))
    stack = read(source, shapes, tensors)["layers.3.experts.up.weight"]
    np.testing.assert_array_equal(stack, np.arange(110).reshape(11, 2, 5).swapaxes(1, 2))
    assert stack.flags.c_contiguous


@pytest.mark.parametrize("num_experts", [1, 3])
def test_experts_that_are_stored_as_a_stack_are_taken_so(num_experts):
    shapes = {"layers.3.experts.up.weight": (num_experts, 5, 2)}
    name = "model.layers.3.experts.up.weight"
    [source] = find(shapes, stored=[name])
    assert source.stored_shapes(shapes) == {name: (num_experts, 2, 5)}
    stack = np.arange(num_experts * 10).reshape(num_experts, 2, 5)
    found = read(source, shapes, {name: stack})["layers.3.experts.up.weight"]
    np.testing.assert_array_equal(found, stack.swapaxes(1, 2))


def test_a_parameter_that_the_map_does_not_name_is_our_bug():
    with pytest.raises(KeyError):
        find({"layers.0.unknown.weight": (1,)})
