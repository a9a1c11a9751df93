from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import wide_weights

from jaxvllm.kernels.matmul import int8_matmul, matmul

SHAPES = [(512, 64), (700, 48), (96, 160)]  # whole tiles of output channels, a tile and a rest, no whole tile


@pytest.mark.parametrize("rows", [1, 2, 64, 65])  # on both sides of the choice of form
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_product_is_with_the_transposed_weight(rows, dtype, tolerance):
    rng = np.random.RandomState(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, 48), (32, 48)))
    y = jax.jit(matmul)(x, weight)
    assert y.dtype == dtype
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=0, atol=tolerance)


def test_bfloat16_is_summed_into_float32_if_requested():
    x = jnp.ones((2, 1000), jnp.bfloat16)
    y = jax.jit(partial(matmul, out_dtype=jnp.float32))(x, x)
    assert y.dtype == jnp.float32
    assert (y == 1000).all()  # bfloat16 would be stuck at 256


@pytest.mark.parametrize("rows", [1, 2, 128])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_float32_products_ask_every_platform_for_full_precision(platform, rows):
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    text = jax.jit(matmul).trace(x, x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("dot_general") == 1
    assert "precision = [HIGHEST, HIGHEST]" in text


def test_one_row_gets_a_second_one_on_the_cpu_unless_it_is_float32():
    def rows_of_the_product(platform, dtype):
        x, weight = (jax.ShapeDtypeStruct((rows, 128), dtype) for rows in (1, 64))
        text = jax.jit(matmul).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
        return 2 if "tensor<2x128x" in text else 1

    assert rows_of_the_product("cpu", jnp.bfloat16) == 2
    assert rows_of_the_product("cpu", jnp.float32) == rows_of_the_product("tpu", jnp.bfloat16) == 1


def random_int8(shape) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a weight; the scales differ widely."""
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, shape).astype(np.int8)
    return jnp.asarray(values), jnp.asarray(rng.uniform(0.001, 0.1, shape[0]).astype(np.float32))


@pytest.mark.parametrize("num_rows", [1, 2, 16, 64, 65, 300])  # on both sides of the choice of form
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_product_is_that_of_values_times_scales(num_rows, shape, dtype):
    values, scales = random_int8(shape)
    x = np.random.default_rng(1).standard_normal((num_rows, shape[1])).astype(np.float32)
    x[:, 3] *= 50  # an outlier, as models have them, must not make the other rows coarser
    x = jnp.asarray(x, dtype)
    weight = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]
    expected = np.asarray(x, np.float64) @ weight.T
    got = np.asarray(int8_matmul(x, values, scales, out_dtype=jnp.float32), np.float64)
    # the error in float32 of a sum whose inputs are rounded to 16 bits of the row's largest value
    bound = np.abs(np.asarray(x, np.float64)).max(axis=1, keepdims=True) / 2**16 * np.abs(weight).sum(axis=1) * 1.01
    assert (np.abs(got - expected) <= bound + 1e-5).all()
    assert int8_matmul(x, values, scales).dtype == jnp.dtype(dtype)


def test_int8_product_of_a_row_depends_on_that_row_alone():
    values, scales = random_int8((64, 32))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 32)), jnp.float32).at[1].set(0).at[2].set(jnp.nan)
    y = np.asarray(int8_matmul(x, values, scales))
    assert not y[1].any()
    assert np.isnan(y[2]).all()
    np.testing.assert_array_equal(y[[0, 3]], np.asarray(int8_matmul(x.at[2].set(1e6), values, scales))[[0, 3]])


@pytest.mark.parametrize("num_rows", [2, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_dequantised_copy_of_an_int8_weight_is_made(num_rows, dtype):
    """XLA's own conversion on the CPU makes one, which shows that the search finds it."""
    F, D = 4096, 512
    x = jax.ShapeDtypeStruct((num_rows, D), jnp.dtype(dtype))
    values, scales = jax.ShapeDtypeStruct((F, D), jnp.int8), jax.ShapeDtypeStruct((F,), jnp.float32)
    compiled = jax.jit(int8_matmul).lower(x, values, scales).compile()
    assert wide_weights(compiled, (F, D)) == []
    memory = compiled.memory_analysis()
    assert memory is not None
    tile_bytes = 0 if num_rows <= 64 else 512 * D * 4
    assert memory.temp_size_in_bytes <= tile_bytes + 4 * num_rows * (F + D) * 4  # plus the rows, in and out

    naive = jax.jit(lambda x, values: matmul(x, values.astype(x.dtype))).lower(x, values).compile()
    assert wide_weights(naive, (F, D)) != []
