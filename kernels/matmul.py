"""Products of activations and weights, each in the form that its platform runs fastest. Weights are [out, in].

A weight is a float array, or int8 with one float32 scale per output channel. No form makes a dequantised copy of an
int8 weight: TPUs and GPUs convert it inside the product, and on the CPU, where XLA would convert the whole weight
first, `_int8_few_rows` and `_int8_many_rows` avoid it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

# Up to this many rows the CPU multiplies float32 two to three times faster with the weight on the left, because XLA's
# library then reads it in its stored order. Not so in bfloat16: CPUs without matrix units run that as a plain loop.
# For int8, up to this many rows the library's int8 product is at least as fast as any other form.
_FEW_ROWS = 64

_INT8_MAX = 127
_TILE = 512  # output channels of int8 converted at a time: 2 MB for 1,024 inputs, which stay in the cache
_SMALLEST = 1e-30  # lower bound of a row's largest value: a row of zeros divides by it


def matmul(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "rows outputs"]:
    """Returns x @ weight.T, summed in float32; `out_dtype` defaults to x's dtype.

    float32 keeps its full precision: the accelerators' default would round the inputs to bfloat16 or TF32.
    """
    product = partial(_product, out_dtype=jnp.dtype(out_dtype or x.dtype))
    if x.dtype == jnp.float32 and x.shape[0] <= _FEW_ROWS:
        return jax.lax.platform_dependent(x, weight, cpu=partial(product, weight_first=True), default=product)
    if x.shape[0] == 1:
        return jax.lax.platform_dependent(x, weight, cpu=partial(_product_of_two_rows, product), default=product)
    return product(x, weight)


def int8_matmul(
    x: Float[Array, "rows inputs"],
    values: Int8[Array, "outputs inputs"],
    scales: Float32[Array, " outputs"],
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "rows outputs"]:
    """Returns x @ (values * scales[:, None]).T, summed in float32; `out_dtype` defaults to x's dtype."""
    y = jax.lax.platform_dependent(x, values, cpu=_int8_cpu, default=_int8_converting) * scales
    return y.astype(out_dtype or x.dtype)


def _product(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    out_dtype: jnp.dtype,
    weight_first: bool = False,
) -> Float[Array, "rows outputs"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if not weight_first:
        return _dot(x, weight, out_dtype, precision)
    # Without the barrier XLA would put the operands back into its own order.
    return jax.lax.optimization_barrier(_dot(weight, x, out_dtype, precision)).T


def _product_of_two_rows(
    product: partial, x: Float[Array, "1 inputs"], weight: Float[Array, "outputs inputs"]
) -> Float[Array, "1 outputs"]:
    """The product with a second row of zeros: XLA's CPU runs one row as a loop that converts all weights to float32."""
    return product(jnp.pad(x, ((0, 1), (0, 0))), weight)[:1]


def _int8_converting(x: Float[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    """Converts the values within the product, where TPUs and GPUs hold them in registers; exact in bfloat16 too."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return _dot(x, values.astype(x.dtype), jnp.float32, precision)


def _int8_cpu(x: Float[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    x = x.astype(jnp.float32)
    return _int8_few_rows(x, values) if x.shape[0] <= _FEW_ROWS else _int8_many_rows(x, values)


def _int8_few_rows(x: Float32[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    """Multiplies int8 by int8, the activations as a sum of two int8 terms: 16 bits of each row's largest value.

    That is more than bfloat16 keeps. Both terms go through one product, which reads the weight once.
    """
    R = x.shape[0]
    step = jnp.maximum(jnp.abs(x).max(axis=1, keepdims=True), _SMALLEST) / _INT8_MAX
    coarse = jnp.round(x / step)
    fine = jnp.round((x / step - coarse) * (2 * _INT8_MAX))  # the rounding error is at most half a step
    sums = _dot(jnp.concatenate([coarse, fine]).astype(jnp.int8), values, jnp.int32).astype(jnp.float32)
    return (sums[:R] + sums[R:] / (2 * _INT8_MAX)) * step


def _int8_many_rows(x: Float32[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    """Multiplies by one tile of output channels at a time, converted to float32 while it is in the cache."""
    F, D = values.shape
    whole = F // _TILE * _TILE
    tiles = values[:whole].reshape(-1, _TILE, D)
    y = jax.lax.map(lambda tile: _dot(x, tile.astype(jnp.float32), jnp.float32), tiles)
    y = y.swapaxes(0, 1).reshape(x.shape[0], whole)
    if whole == F:
        return y
    return jnp.concatenate([y, _dot(x, values[whole:].astype(jnp.float32), jnp.float32)], axis=1)


def _dot(x: Array, w: Array, out_dtype: jax.typing.DTypeLike, precision: jax.lax.Precision | None = None) -> Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=out_dtype)
