"""Mixtures of experts: each token goes through the few feed-forward layers that a router chooses for it."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxvllm.models.config import ModelConfig
from jaxvllm.models.layers import ACTIVATIONS, MLP, Linear, Style

_TILE_ROWS = (8, 64)  # of one expert in a step of the CPU's loop: with few rows per expert a long tile is mostly waste


class ExpertsLinear(nnx.Module):
    """The same product of every expert, one weight [E, in, out].

    Not [out, in] as elsewhere: the TPU's ragged product would copy every weight in every step to turn it round.
    """

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, dtype: str):
        self.weight = nnx.Param(jnp.zeros((num_experts, inputs, outputs), dtype))


class SparseMLP(nnx.Module):
    """Adds up what a token's experts say, weighed by the router; and what the shared expert says, if there is one."""

    def __init__(self, config: ModelConfig, style: Style):
        assert config.experts is not None  # the config has checked it
        D, E, F = config.hidden_size, config.experts.num_experts, config.experts.intermediate_size
        self.experts = config.experts
        self.hidden_act = config.hidden_act
        self.router = Linear(D, E, bias=False, dtype=config.dtype)
        make = partial(ExpertsLinear, E, dtype=config.dtype)
        self.gate, self.up, self.down = make(D, F), make(D, F), make(F, D)
        shared = config.experts.shared_intermediate_size
        self.shared = None if shared is None else MLP(config, shared)
        self.shared_gate = Linear(D, 1, bias=False, dtype=config.dtype) if style.shared_expert_gate else None

    def __call__(self, x: Float[Array, "T D"], num_live: Int32[Array, ""]) -> Float[Array, "T D"]:
        """`num_live` tokens come before the rows of padding, which go to no expert."""
        T, E, top = x.shape[0], self.experts.num_experts, self.experts.num_experts_per_token
        probabilities = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        weights, chosen = lax.top_k(probabilities, top)
        if self.experts.normalize_weights:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        # Pairs of token and expert in the order of the experts; padding counts as an expert past the last one.
        chosen = jnp.where(jnp.arange(T)[:, None] < num_live, chosen, E).reshape(-1)
        order = jnp.argsort(chosen, stable=True)
        group_sizes = jnp.bincount(chosen, length=E)
        rows = experts_mlp(
            x[order // top], self.gate.weight[...], self.up.weight[...], self.down.weight[...], group_sizes,
            hidden_act=self.hidden_act,
        )  # fmt: skip
        rows = rows[jnp.argsort(order)].reshape(T, top, -1)
        y = jnp.einsum("ted,te->td", rows.astype(jnp.float32), weights).astype(x.dtype)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)


def experts_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    hidden_act: str,
) -> Float[Array, "R D"]:
    """Sends each row through its expert: the first `group_sizes[0]` rows through expert 0, and so on; then zeros.

    Accelerators take JAX's ragged product. On the CPU that one multiplies every row by every expert; a loop over
    tiles of rows reads only the experts that have rows (measured: `jaxvllm bench experts`).
    """
    args = (x, gate, up, down, group_sizes)
    tiles, ragged = (partial(form, hidden_act=hidden_act) for form in (tiled_mlp, ragged_mlp))
    return lax.platform_dependent(*args, cpu=tiles, default=ragged)


def ragged_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    hidden_act: str,
) -> Float[Array, "R D"]:
    product = partial(lax.ragged_dot, group_sizes=group_sizes, precision=_precision(x), preferred_element_type=x.dtype)
    y = product(ACTIVATIONS[hidden_act](product(x, gate)) * product(x, up), down)
    return jnp.where(jnp.arange(x.shape[0])[:, None] < group_sizes.sum(), y, 0)  # not every platform clears the rest


def tiled_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    hidden_act: str,
) -> Float[Array, "R D"]:
    R, E = x.shape[0], gate.shape[0]
    tile = _TILE_ROWS[0] if E * _TILE_ROWS[0] > R else _TILE_ROWS[1]
    end_row = jnp.cumsum(group_sizes)
    num_tiles = (group_sizes + (tile - 1)) // tile
    end_tile = jnp.cumsum(num_tiles)
    x = jnp.pad(x, ((0, tile), (0, 0)))  # so that no tile starts so late that it would be moved

    def product(rows, weight, expert):
        of_expert = lax.dynamic_index_in_dim(weight, expert, keepdims=False)
        return lax.dot_general(
            rows, of_expert, (((1,), (0,)), ((), ())), precision=_precision(x), preferred_element_type=x.dtype
        )

    def run_tile(i, out):
        expert = jnp.sum(i >= end_tile)
        row = end_row[expert] - group_sizes[expert] + (i - end_tile[expert] + num_tiles[expert]) * tile
        rows = lax.dynamic_slice_in_dim(x, row, tile)
        hidden = ACTIVATIONS[hidden_act](product(rows, gate, expert)) * product(rows, up, expert)
        y = product(hidden, down, expert)
        # A tile's last rows may be the next expert's, whose tiles come later and overwrite them, or no expert's.
        y = jnp.where((row + jnp.arange(tile))[:, None] < end_row[-1], y, 0)
        return lax.dynamic_update_slice_in_dim(out, y, row, 0)

    return lax.fori_loop(0, end_tile[-1], run_tile, jnp.zeros_like(x))[:R]


def _precision(x: Float[Array, "..."]) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
