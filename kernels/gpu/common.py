"""What the Mosaic GPU kernels share: the chip they are planned for, and one spelling for two JAX versions."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
MASKED = -1e30  # a score that is not seen. Stands for -inf, which would give NaN when subtracted from itself
# The running maximum of a row that has seen nothing yet: below any true score, and so far above a masked one
# that its weight is exactly 0. (Were the two alike, a fused multiply-add would leave their rounding error, 1e22.)
NO_MAXIMUM = -1e20
WGMMA = plgpu.Layout.WGMMA
_HAS_STORE = hasattr(plgpu, "store")  # from jax 0.12 on


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuChip:
    """What the kernels' plans depend on. Hopper's figures; a kernel never asks a device."""

    num_multiprocessors: int = 132
    smem_per_multiprocessor_bytes: int = 233_472
    smem_per_block_bytes: int = 232_448  # the most one thread block may ask for


HOPPER = GpuChip()  # H100 SXM, H200 and GH200 alike


def mma_transforms(width: int) -> tuple[Any, Any]:
    """Returns the tiling and swizzle wgmma wants of a 16-bit operand whose rows have `width` elements."""
    swizzle = min(128, width * 2)
    # pyright takes the two for abstract: their base class declares what jax registers elsewhere
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def transposed(ref):
    """Returns `ref.T` as jax 0.12 spells it, or as 0.11 does."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def store(ref, value):
    """Writes a register array to a ref without tiling.

    Said to be "not optimized": the search for an optimized layout of such a store may never end.
    """
    if _HAS_STORE:
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_transposed(ref, value):
    """Writes ref [n, m] = value.T, for a 16-bit value [m, n] in the WGMMA layout."""
    transposed(ref)[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
    """Returns a float32 register array of one value, in `layout`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def scores_in_base_2(s: jax.Array, scale: float, logits_soft_cap: float | None) -> tuple[jax.Array, float]:
    """Returns (x, c) with x * c the scaled, capped scores times log2(e).

    c stays outside so that the weight exp2(x * c - m) costs one FMA and one exp2 per element.
    """
    if logits_soft_cap is None:
        return s, scale * LOG2E
    # tanh(y) = 1 - 2 / (e^2y + 1): its error near 0 is absolute and tiny, and overflow gives exactly 1
    doubled = jnp.exp2(s * (2 * scale * LOG2E / logits_soft_cap))
    return 1 - 2 / (doubled + 1), logits_soft_cap * LOG2E


def product(a, b) -> jax.Array:
    """Returns a @ b in float32, both operands in shared memory, complete when it returns."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def add_product(acc: jax.Array, a, b, *, interpreted: bool) -> jax.Array:
    """Returns acc + a @ b, in place of acc where registers are scarce.

    Interpret mode has no accumulator with a beginning, so there the product is added: all that differs.
    """
    if interpreted:
        return acc + product(a, b)
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage, reportReturnType]
