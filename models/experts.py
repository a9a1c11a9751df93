"""Mixtures of experts: each token goes through the few feed-forward layers that a router chooses for it."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels.grouped_matmul import grouped_mlp
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.layers import ACTIVATIONS, MLP, Linear, Style


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
        rows = grouped_mlp(
            x[order // top], self.gate.weight[...], self.up.weight[...], self.down.weight[...], group_sizes,
            activation=ACTIVATIONS[self.hidden_act],
        )  # fmt: skip
        rows = rows[jnp.argsort(order)].reshape(T, top, -1)
        y = jnp.einsum("ted,te->td", rows.astype(jnp.float32), weights).astype(x.dtype)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)
