from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import BLOCK_SIZE, Runner
from tiny_models import tiny_llama, tiny_model, tiny_qwen3

from jaxvllm.models import decoder
from jaxvllm.models.checkpoint.loader import load_model
from jaxvllm.models.layers import Embedding, RMSNorm, linear


@pytest.mark.parametrize("rows", [1, 2, 64, 65])  # on both sides of the choice of form
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_linear_is_a_product_with_the_transposed_weight(rows, dtype, tolerance):
    rng = np.random.RandomState(0)
    x, weight, bias = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, 48), (32, 48), (32,)))
    y = jax.jit(linear)(x, weight, bias)
    assert y.dtype == dtype
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(bias, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=0, atol=tolerance)


def test_linear_sums_bfloat16_into_float32_where_asked():
    x = jnp.ones((2, 1000), jnp.bfloat16)
    y = jax.jit(partial(linear, out_dtype=jnp.float32))(x, x)
    assert y.dtype == jnp.float32
    assert (y == 1000).all()  # bfloat16 would be stuck at 256


@pytest.mark.parametrize("rows", [1, 2, 128])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_float32_products_ask_every_platform_for_full_precision(platform, rows):
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    text = jax.jit(linear).trace(x, x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("dot_general") == 1
    assert "precision = [HIGHEST, HIGHEST]" in text


def test_one_row_gets_a_second_one_on_the_cpu_where_it_is_not_float32():
    def rows_of_the_product(platform, dtype):
        x, weight = (jax.ShapeDtypeStruct((rows, 128), dtype) for rows in (1, 64))
        text = jax.jit(linear).trace(x, weight).lower(lowering_platforms=(platform,)).as_text()
        return 2 if "tensor<2x128x" in text else 1

    assert rows_of_the_product("cpu", jnp.bfloat16) == 2
    assert rows_of_the_product("cpu", jnp.float32) == rows_of_the_product("tpu", jnp.bfloat16) == 1


def test_rms_norm_computes_in_float32():
    norm = RMSNorm(4, eps=1e-6, dtype="bfloat16")
    x = jnp.asarray([[200.0, -200.0, 100.0, 100.0]], jnp.bfloat16)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-6)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=4e-3)
    assert not np.isnan(norm(jnp.zeros((1, 4), jnp.bfloat16))).any()


def test_embedding_of_an_id_outside_the_table_is_finite():
    embed = Embedding(8, 4, dtype="float32")
    embed.weight[...] = jnp.ones((8, 4))
    assert (embed(jnp.asarray([0, 7, 8, 1000], jnp.int32)) == 1).all()


@pytest.mark.parametrize(("make", "changes", "kinds"), [
    (tiny_llama, {}, 1),
    (tiny_qwen3, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, 2),
])  # fmt: skip
def test_layer_is_traced_once_per_program_and_kind(make, changes, kinds, tmp_path, monkeypatch):
    model = load_model(make(tmp_path, tokenizer=False, **changes))[1]
    traced = []
    body = decoder.DecoderLayer.__call__
    monkeypatch.setattr(
        decoder.DecoderLayer, "__call__", lambda self, *args, **kw: traced.append(self) or body(self, *args, **kw)
    )
    Runner(model, 1, 80).step([[1, 2, 3]])  # a length that no other test has: nothing is traced yet
    assert len(traced) == kinds


def test_cache_is_updated_in_place_and_nothing_of_its_size_is_made(tmp_path):
    model = load_model(tiny_llama(tmp_path, tokenizer=False))[1]
    runner = Runner(model, 4, 512)
    memory = runner.compiled([[1]] * 4, decode_only=True).memory_analysis()
    assert memory is not None
    pool_bytes = [pool.nbytes for pool in runner.pools]
    assert memory.alias_size_in_bytes == sum(pool_bytes)
    assert memory.temp_size_in_bytes < pool_bytes[0]


def test_parameters_of_a_model_are_plain_leaves_of_its_state(tmp_path):
    model = load_model(tiny_llama(tmp_path, tokenizer=False))[1]
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == 2 * 512 * 64 + 64 + 3 * (2 * 64 + 64 * 64 * 3 + 64 * 160 * 3)


@pytest.mark.parametrize("num_new", [1, 5])
def test_a_layer_with_a_window_reads_only_the_blocks_that_the_window_reaches(num_new, tmp_path):
    """The blocks before it may hold anything: here NaN."""
    model = load_model(tiny_model(tmp_path, "mistral", tokenizer=False))[1]
    window, length = 24, 100
    tokens = np.random.RandomState(0).randint(0, 512, length + num_new).tolist()
    runner, poisoned = Runner(model, 1, 128), Runner(model, 1, 128)
    for r in (runner, poisoned):
        r.step([tokens[:length]])
    first_reached = (length - (window - 1)) // BLOCK_SIZE
    assert first_reached == 4
    unreached = poisoned.tables[0, :first_reached]
    poisoned.pools = [pool.at[unreached].set(jnp.nan) for pool in poisoned.pools]
    expected, found = (r.step([tokens[length:]], decode_only=num_new == 1)[0] for r in (runner, poisoned))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found, expected)
