"""Weight-only int8: weights of 8 bits and one scale per output channel. Activations keep their precision."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float32, Int8

_LEVELS = 127  # -128 is left out, so that a weight and its negative are as exact
_ROWS_AT_ONCE = 4096  # of a weight, while it is quantised: bounds the float32 copy
_SMALLEST = 1e-30  # lower bound of a row's largest value: a row of zeros divides by it


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
