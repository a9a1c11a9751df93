"""Gated feed-forward layers of several experts, the rows grouped by expert, in the form fastest on each platform.

R rows, of which the first `group_sizes[0]` go through expert 0, the next `group_sizes[1]` through expert 1, and so on.
Rows past the last group are padding: their output is zero.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

Activation = Callable[[Array], Array]

_TILE_ROWS = (8, 64)  # of one expert per step of the CPU's loop: with few rows per expert a long tile is mostly padding


def grouped_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    activation: Activation,
) -> Float[Array, "R D"]:
    """Returns down(activation(gate(x)) * up(x)), each row by its own expert's weights.

    Accelerators run JAX's ragged product. On the CPU that one multiplies every row by every expert; a loop over tiles
    of rows reads only the experts that have rows (measured: `jaxvllm bench experts`).
    """
    args = (x, gate, up, down, group_sizes)
    tiled, ragged = (partial(form, activation=activation) for form in (tiled_mlp, ragged_mlp))
    return lax.platform_dependent(*args, cpu=tiled, default=ragged)


def ragged_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    activation: Activation,
) -> Float[Array, "R D"]:
    """`grouped_mlp` by JAX's ragged product."""
    product = partial(lax.ragged_dot, group_sizes=group_sizes, precision=_precision(x), preferred_element_type=x.dtype)
    y = product(activation(product(x, gate)) * product(x, up), down)
    return jnp.where(jnp.arange(x.shape[0])[:, None] < group_sizes.sum(), y, 0)  # not every platform clears the rest


def tiled_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    activation: Activation,
) -> Float[Array, "R D"]:
    """`grouped_mlp` by a loop over tiles of rows, each of one expert."""
    R, E = x.shape[0], gate.shape[0]
    tile = _TILE_ROWS[0] if E * _TILE_ROWS[0] > R else _TILE_ROWS[1]
    end_row = jnp.cumsum(group_sizes)
    num_tiles = (group_sizes + (tile - 1)) // tile
    end_tile = jnp.cumsum(num_tiles)
    x = jnp.pad(x, ((0, tile), (0, 0)))  # a slice that ran past the end would be moved back

    def product(rows, weight, expert):
        of_expert = lax.dynamic_index_in_dim(weight, expert, keepdims=False)
        return lax.dot_general(
            rows, of_expert, (((1,), (0,)), ((), ())), precision=_precision(x), preferred_element_type=x.dtype
        )

    def run_tile(i, out):
        expert = jnp.sum(i >= end_tile)
        row = end_row[expert] - group_sizes[expert] + (i - end_tile[expert] + num_tiles[expert]) * tile
        rows = lax.dynamic_slice_in_dim(x, row, tile)
        hidden = activation(product(rows, gate, expert)) * product(rows, up, expert)
        y = product(hidden, down, expert)
        # A tile's last rows may belong to the next expert, whose tiles come later and overwrite them, or be padding.
        y = jnp.where((row + jnp.arange(tile))[:, None] < end_row[-1], y, 0)
        return lax.dynamic_update_slice_in_dim(out, y, row, 0)

    return lax.fori_loop(0, end_tile[-1], run_tile, jnp.zeros_like(x))[:R]


def _precision(x: Float[Array, "..."]) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
