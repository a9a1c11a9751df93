"""Times the forms of a mixture of experts against each other on this machine."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels.grouped_matmul import Activation, ragged_mlp, tiled_mlp

_REPEATS = 5


def dense_mlp(
    x: Float[Array, "R D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    group_sizes: Int32[Array, " E"],
    *,
    activation: Activation,
) -> Float[Array, "R D"]:
    """The obvious form: one expert after the other takes every row, and what is not its own becomes zero."""
    end_row = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def add_expert(e, out):
        hidden = activation(x @ gate[e]) * (x @ up[e])
        is_own = (row < end_row[e]) & (row >= end_row[e] - group_sizes[e])
        return jnp.where(is_own, hidden @ down[e], out)

    return jax.lax.fori_loop(0, gate.shape[0], add_expert, jnp.zeros_like(x))


FORMS: dict[str, Callable[..., Array]] = {"dense loop": dense_mlp, "ragged_dot": ragged_mlp, "tiles": tiled_mlp}


def time_forms(
    num_tokens: int, *, num_experts: int, per_token: int, hidden_size: int, intermediate_size: int, dtype: str
) -> Iterator[tuple[str, float]]:
    """Yields each form's name and its median time in seconds, the forms taking turns; random routing."""
    rng = np.random.RandomState(0)
    rows, E, D, F = num_tokens * per_token, num_experts, hidden_size, intermediate_size
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, D), (E, D, F), (E, D, F), (E, F, D))]
    chosen = np.concatenate([rng.choice(E, per_token, replace=False) for _ in range(num_tokens)])
    group_sizes = jnp.asarray(np.bincount(chosen, minlength=E), jnp.int32)
    programs = {name: jax.jit(partial(form, activation=jax.nn.silu)) for name, form in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(_REPEATS + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            program(*arrays, group_sizes).block_until_ready()
            if repeat:  # the first one compiles
                times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        yield name, statistics.median(seconds)
