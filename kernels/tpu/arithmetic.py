"""What the TPU kernels share: whole numbers by shifts, copies of a chunk of blocks, one step of the online softmax."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: (-inf) - (-inf) would be NaN
# it moved in jax 0.12
_approximate_reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal
_LOG2_E = 1.4426950408889634


def round_up(x, power: int):
    """Rounds up to a multiple of a power of two. The scalar core has no division: a shift is one cycle."""
    return (x + (power - 1)) & -power


def quotient(x, power: int):
    """Divides what is not negative by a power of two, downwards."""
    return x >> (power.bit_length() - 1)


def at_least_zero(x, limit):
    return jnp.minimum(jnp.maximum(x, 0), limit)


def equal_lanes(x: jax.Array, width: int) -> jax.Array:
    """Widens or narrows `x` [rows, 128], whose lanes are all equal, to [rows, width]: no data moves."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def products(pool_dtype) -> Callable:
    """Returns the matrix product of a pool's dtype, summed in float32; `transposed` multiplies rows by rows."""
    precision = lax.Precision.HIGHEST if pool_dtype == jnp.float32 else None

    def product(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
        dims = (((1,), (1 if transposed else 0,)), ((), ()))
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32, precision=precision)

    return product


def base2_scores(product: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scales and caps q.k, in units of log2(e): the exponential of base 2 is the cheaper one."""
    if soft_cap is None:
        return product * (scale * _LOG2_E)
    return (soft_cap * _LOG2_E) * jnp.tanh(product * (scale / soft_cap))


def softmax_step(scores: jax.Array, m_ref) -> tuple[jax.Array, jax.Array]:
    """Folds scores [rows, tokens] into the running maximum, a ref [rows, 128] of equal lanes.

    Returns the weights, and the factor [rows, 128] by which what was summed before must shrink.
    """
    m_before = m_ref[...]
    m = jnp.maximum(m_before, jnp.max(scores, axis=1, keepdims=True))
    m_ref[...] = m
    return jnp.exp2(scores - equal_lanes(m, scores.shape[1])), jnp.exp2(m_before - m)


def start_blocks(tables, row, live, pool, kv_buf, first: int, sem, *, heads, grain: int):
    """Starts the copies of one sequence's `live` tokens, from table entry `row` on, into blocks `first` on.

    Whole blocks one by one; of the last only the tiles of `grain` tokens that hold any. kv_buf [CB, K, P, 2Hp].
    """
    P = pool.shape[2]
    full, rest = quotient(live, P), pl.multiple_of(round_up(live & (P - 1), grain), grain)

    def copy_whole(j, _):
        block = pool.at[tables[row + j]] if heads is None else pool.at[tables[row + j], heads]
        pltpu.make_async_copy(block, kv_buf.at[first + j], sem).start()

    lax.fori_loop(0, full, copy_whole, None)

    @pl.when(rest > 0)
    def _():
        heads_of = pl.ds(0, kv_buf.shape[1]) if heads is None else heads
        block = pool.at[tables[row + full], heads_of, pl.ds(0, rest)]
        pltpu.make_async_copy(block, kv_buf.at[first + full, :, pl.ds(0, rest)], sem).start()


def wait_blocks(size, kv_buf, sem, *, grain: int):
    """Waits for copies of `size` tokens together, a multiple of grain: a wait counts bytes, not copies."""
    P = kv_buf.shape[2]
    full, rest = quotient(size, P), pl.multiple_of(size & (P - 1), grain)
    whole, part = kv_buf.at[pl.ds(0, full)], kv_buf.at[0, :, pl.ds(0, rest)]
    pl.when(full > 0)(lambda: pltpu.make_async_copy(whole, whole, sem).wait())
    pl.when(rest > 0)(lambda: pltpu.make_async_copy(part, part, sem).wait())


def load_kv(kv_buf, blocks, head, width: int) -> tuple[jax.Array, jax.Array]:
    """Loads keys and values [tokens, width] of some blocks of a head; kv_buf [CB, K, P, 2Hp].

    With Hp = 64 both are the same 128 lanes: the query's upper half is zero, so that the scores are the keys',
    and of the answer only the upper half counts, the values'.
    """
    if kv_buf.shape[3] == width:
        kv = kv_buf[blocks, head].reshape(-1, width)
        return kv, kv
    k, v = (kv_buf[blocks, head, :, pl.ds(at, width)].reshape(-1, width) for at in (0, width))
    return k, v


def clear_rows(x: jax.Array, live) -> jax.Array:
    """Zeroes the rows from `live` on: a weight of zero times a NaN would still be NaN."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(row < live, x, jnp.zeros_like(x))


def reciprocal(x: jax.Array) -> jax.Array:
    """1/x by Newton from the approximate one: a division costs twenty instructions on v5e, this six."""
    r = _approximate_reciprocal(x, approx=True)
    for _ in range(2):
        r = r * (2 - x * r)
    return r
