"""Weight-only int8: weights of 8 bits and one scale per output channel, and the product that reads them as they lie.

Activations keep their precision. No form here makes a dequantised copy of a weight: TPUs and GPUs convert inside the
product, and on the CPU, where XLA would convert the whole weight first, `_few_rows` and `_many_rows` go around it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8

_LEVELS = 127  # -128 is left out, so that a weight and its negative are as exact
_ROWS_AT_ONCE = 4096  # of a weight, while it is quantised: bounds the float32 copy

# On the CPU: up to so many rows the library's int8 product is at least as fast as any other, past it float32 is.
_FEW_ROWS = 64
_TILE = 512  # output channels converted at a time: 2 MB for 1,024 inputs, which stay in the cache

_SMALLEST = 1e-30  # of a row's largest value: a row of zeros divides by it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] as `values * scales[:, None]`. Takes the place of an array in a `Linear`'s `Param`."""

    values: Int8[Array, "outputs inputs"]
    scales: Float32[Array, " outputs"]

    def __getitem__(self, _: object) -> "QuantizedWeight":
        return self  # `Param[...]` asks its value for all of itself


def quantize(weight: np.ndarray) -> tuple[Int8[np.ndarray, "outputs inputs"], Float32[np.ndarray, " outputs"]]:
    """Returns values of [-127, 127] and scales, the product of both nearest to a host weight [out, in].

    Raises ValueError where a row holds a number that is not finite: no scale would fit it.
    """
    values = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[0], np.float32)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        rows = weight[part].astype(np.float32)
        scales[part] = np.maximum(np.maximum(rows.max(axis=1), -rows.min(axis=1)), _SMALLEST) / _LEVELS
        if not np.isfinite(scales[part]).all():
            raise ValueError("it holds numbers that are not finite.")
        rows /= scales[part, None]
        values[part] = np.rint(rows, out=rows)
    return values, scales


def quantized_product(x: Float[Array, "rows inputs"], weight: QuantizedWeight) -> Float32[Array, "rows outputs"]:
    """Returns x @ weight.T in float32, from the int8 values."""
    y = jax.lax.platform_dependent(x, weight.values, cpu=_cpu_product, default=_converting_product)
    return y * weight.scales


def _converting_product(x: Float[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    """Converts the values within the product, where TPUs and GPUs hold them in registers; exact in bfloat16 too."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return _dot(x, values.astype(x.dtype), jnp.float32, precision)


def _cpu_product(x: Float[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    x = x.astype(jnp.float32)
    return _few_rows(x, values) if x.shape[0] <= _FEW_ROWS else _many_rows(x, values)


def _few_rows(x: Float32[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    """Multiplies int8 by int8, the activations as a sum of two int8 terms: 16 bits of each row's largest value.

    That is more than bfloat16 keeps of it. Both terms go through one product, which reads the weight once.
    """
    R = x.shape[0]
    step = jnp.maximum(jnp.abs(x).max(axis=1, keepdims=True), _SMALLEST) / _LEVELS
    coarse = jnp.round(x / step)
    fine = jnp.round((x / step - coarse) * (2 * _LEVELS))  # what rounding left is at most half a step
    sums = _dot(jnp.concatenate([coarse, fine]).astype(jnp.int8), values, jnp.int32).astype(jnp.float32)
    return (sums[:R] + sums[R:] / (2 * _LEVELS)) * step


def _many_rows(x: Float32[Array, "rows inputs"], values: Int8[Array, "outputs inputs"]) -> Float32[Array, "..."]:
    """Multiplies by a tile of output channels at a time, converted to float32 while it is in the cache."""
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
