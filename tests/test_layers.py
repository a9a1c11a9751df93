import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import BLOCK_SIZE, Runner
from tiny_models import tiny_llama, tiny_model, tiny_qwen3

from jaxvllm.models import decoder
from jaxvllm.models.checkpoint.loader import load_model
from jaxvllm.models.layers import Embedding, Linear, RMSNorm


def test_linear_adds_its_bias():
    layer = Linear(3, 2, bias=True, dtype="float32")
    assert layer.bias is not None
    layer.weight[...] = jnp.asarray([[1.0, 0, 0], [0, 2, 0]])
    layer.bias[...] = jnp.asarray([10.0, 20])
    np.testing.assert_array_equal(layer(jnp.asarray([[1.0, 2, 3]])), [[11, 24]])


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
