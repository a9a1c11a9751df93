"""The pool: its shape, what is written where, and that nothing is copied on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.kernels import kv_cache


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, 64), (24, 64), (64, 64), (65, 128), (96, 128), (128, 128), (160, 256), (256, 256)]
)
def test_heads_are_padded_to_the_tiles_of_an_accelerator(head_dim, padded):
    assert kv_cache.padded_head_dim(head_dim, "tpu") == kv_cache.padded_head_dim(head_dim, "gpu") == padded
    assert kv_cache.padded_head_dim(head_dim, "xla") == head_dim


def test_a_row_of_the_pool_holds_a_key_and_a_value():
    assert kv_cache.pool_shape(10, 2, 16, 24, "xla") == (10, 2, 16, 48)
    assert kv_cache.pool_shape(10, 2, 16, 24, "tpu") == (10, 2, 16, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 16, 64, "xla"), "num_blocks=0"),
        ((4, 0, 16, 64, "xla"), "num_kv_heads=0"),
        ((4, 2, 0, 64, "xla"), "block_size=0"),
        ((4, 2, 16, 0, "xla"), "head_dim=0"),
        ((4, 2, 16, 64, "cuda"), "backend='cuda'"),
        ((2**27, 1, 16, 64, "xla"), "lower num_kvcache_blocks"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kv_cache.pool_shape(*arguments)


def test_every_layer_has_a_pool_of_its_own():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pools = kv_cache.allocate(3, (4, 2, 8, 32), "bfloat16", sharding)
    assert len({pool.unsafe_buffer_pointer() for pool in pools}) == 3
    for pool in pools:
        assert pool.shape == (4, 2, 8, 32)
        assert pool.dtype == jnp.bfloat16
        assert pool.sharding == sharding
        assert not np.asarray(pool, np.float32).any()


@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_back_in_token_order(backend, dtype):
    rng = np.random.default_rng(0)
    num_tokens, K, P, H = 19, 3, 4, 24
    table = jnp.asarray([5, 0, 7, 2, 6], jnp.int32)
    k, v = (jnp.asarray(rng.normal(size=(num_tokens, K, H)), dtype) for _ in range(2))
    (pool,) = kv_cache.allocate(1, kv_cache.pool_shape(8, K, P, H, backend), dtype)
    position = np.arange(num_tokens)
    slots = np.asarray(table)[position // P] * P + position % P
    for part in np.array_split(rng.permutation(num_tokens), 3):
        pool = kv_cache.write(pool, k[part], v[part], jnp.asarray(slots[part], jnp.int32))
    for length in (0, 1, 4, 18, 19):
        read_k, read_v = kv_cache.read(pool, table, length, H)
        np.testing.assert_array_equal(np.asarray(read_k), np.asarray(k[:length]))
        np.testing.assert_array_equal(np.asarray(read_v), np.asarray(v[:length]))


def test_a_write_over_nan_leaves_none_in_the_padding_of_a_head():
    pool = jnp.full(kv_cache.pool_shape(2, 1, 2, 24, "tpu"), jnp.nan)
    ones = jnp.ones((1, 1, 24))
    row = np.asarray(kv_cache.write(pool, ones, ones, jnp.asarray([3], jnp.int32)))[1, 0, 1]
    assert row[:24].tolist() == row[64:88].tolist() == [1] * 24
    assert not row[24:64].any()
    assert not row[88:].any()


def test_the_pool_keeps_its_dtype():
    pool = jnp.zeros((2, 1, 2, 4), jnp.bfloat16)
    ones = jnp.ones((1, 1, 2))
    assert kv_cache.write(pool, ones, ones, jnp.zeros(1, jnp.int32)).dtype == jnp.bfloat16


@pytest.mark.parametrize("slot", [-1, -8, 8, 9, 2**31 - 1, -(2**31)])
def test_a_slot_outside_the_pool_is_dropped(slot):
    """A live sequence stands in the last block (fault case 13): no padding, however spelt, may touch it."""
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.normal(size=(4, 1, 2, 8)), jnp.float32)
    new = jnp.asarray(rng.normal(size=(4, 1, 4)), jnp.float32)
    written = np.asarray(kv_cache.write(pool, new, new, jnp.asarray([2, slot, slot, slot], jnp.int32)))
    want = np.array(pool)
    want[1, :, 0] = np.concatenate([new[0], new[0]], axis=-1)
    np.testing.assert_array_equal(written, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [2, 512, 8192])
def test_a_donated_pool_is_written_in_place(dtype, num_tokens):
    pool, new, slots = (
        jax.ShapeDtypeStruct(shape, of)
        for shape, of in (((20_000, 8, 16, 256), dtype), ((num_tokens, 8, 128), dtype), ((num_tokens,), jnp.int32))
    )
    memory = jax.jit(kv_cache.write, donate_argnums=0).lower(pool, new, new, slots).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.size * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 1 << 20


def test_more_tokens_than_the_blocks_hold_are_refused():
    pool = jnp.zeros((4, 1, 2, 8))
    with pytest.raises(ValueError, match="num_tokens=5"):
        kv_cache.read(pool, jnp.zeros(2, jnp.int32), 5, 4)
