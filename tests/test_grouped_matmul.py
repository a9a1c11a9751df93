from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.kernels.grouped_matmul import grouped_mlp, ragged_mlp, tiled_mlp
from tools.cpu.experts import dense_mlp, time_forms

GROUPS = {  # rows of each of 5 experts; R is 40
    "an expert without rows": [3, 0, 20, 1, 16],
    "one expert for all": [0, 0, 40, 0, 0],
    "no rows at all": [0, 0, 0, 0, 0],
    "rows of padding at the end": [1, 9, 8, 0, 7],
}


def arrays(R=40, E=5, D=12, F=20, dtype="float32"):
    rng = np.random.RandomState(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((R, D), (E, D, F), (E, D, F), (E, F, D))]


def oracle(arrays, group_sizes):
    """Row by row, in float64."""
    x, gate, up, down = (np.asarray(value, np.float64) for value in arrays)
    out = np.zeros_like(x)
    for row, e in enumerate(np.repeat(np.arange(len(group_sizes)), group_sizes)):
        hidden = x[row] @ gate[e]
        out[row] = (hidden / (1 + np.exp(-hidden)) * (x[row] @ up[e])) @ down[e]
    return out


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("form", [grouped_mlp, ragged_mlp, tiled_mlp, dense_mlp])
@pytest.mark.parametrize("R", [40, 400])  # in short tiles and in long ones
def test_every_form_sends_each_row_through_its_own_expert(form, groups, R):
    values = arrays(R)
    groups = [size * R // 40 for size in groups]
    found = jax.jit(partial(form, activation=jax.nn.silu))(*values, jnp.asarray(groups, jnp.int32))
    np.testing.assert_allclose(found, oracle(values, groups), rtol=0, atol=2e-4)


def test_a_row_of_padding_may_hold_anything():
    values = arrays()
    values[0] = values[0].at[30:].set(jnp.nan)
    groups = jnp.asarray([10, 5, 5, 5, 5], jnp.int32)
    for form in (grouped_mlp, tiled_mlp):
        found = np.asarray(jax.jit(partial(form, activation=jax.nn.silu))(*values, groups))
        assert np.isfinite(found[:30]).all()
        assert (found[30:] == 0).all()


def test_the_forms_are_timed_with_the_same_routing():
    sizes = {"num_experts": 4, "per_token": 2, "hidden_size": 8, "intermediate_size": 8, "dtype": "float32"}
    times = dict(time_forms(3, **sizes))
    assert times.keys() == {"dense loop", "ragged_dot", "tiles"}
    assert all(seconds > 0 for seconds in times.values())


@pytest.mark.parametrize(("platform", "ragged"), [("cpu", False), ("tpu", True), ("cuda", True)])
def test_accelerators_get_the_ragged_product_and_the_cpu_the_tiles(platform, ragged):
    program = jax.jit(partial(grouped_mlp, activation=jax.nn.silu))
    text = program.trace(*arrays(), jnp.zeros(5, jnp.int32)).lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in text) == ragged
    assert ("while" in text) != ragged
