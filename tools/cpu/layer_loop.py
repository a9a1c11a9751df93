"""Unrolled layers against a scan over layers: `python -m tools.cpu.layer_loop CONFIG [CHIP ...]`.

What each costs to compile and, on this machine's device, to run; for a TPU that need not be here (`v6e`), to compile
and in temporaries. CONFIG is a name of `random_model.CONFIGS` or a config.json, of layers that are all alike.

A scan wants the layers' pools in one array. It can carry that array, and take a layer's pool out and put it back, or
take the pools in and give them out one by one. Weights are stacked before, not in the step.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.aot import chips
from jaxvllm.bench.random_model import RandomCheckpoint
from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.paged_attention import AttentionBatch
from jaxvllm.models import registry
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.decoder import Decoder

_BLOCK_SIZE = 64
_CONTEXT = 1024  # tokens of a sequence in the cache
_REPEATS = 20
STEPS = {"decode of 32": (32, 32), "prefill of 512": (512, 4)}  # tokens, sequences
FORMS = ("unrolled", "scan, pools carried", "scan, pools in and out")


def _scan(form: str, model: Decoder, layer_def: Any, layers: Any, ids, positions, pools, batch, **options):
    """What `Decoder.__call__` does, of stacked layers and one array of pools [L, B, K, P, 2Hp]."""
    (angles,) = model._angles(positions).values()
    x = model.embed(ids)

    def apply(x, params, pool):
        return nnx.merge(layer_def, params)(x, angles, pool, batch, **options)

    def carried(state, inputs):
        x, pools = state
        i, params = inputs
        x, pool = apply(x, params, jax.lax.dynamic_index_in_dim(pools, i, keepdims=False))
        return (x, jax.lax.dynamic_update_index_in_dim(pools, pool, i, 0)), None

    if form == FORMS[1]:
        (x, pools), _ = jax.lax.scan(carried, (x, pools), (jnp.arange(pools.shape[0]), layers))
    else:
        x, pools = jax.lax.scan(lambda x, inputs: apply(x, *inputs), x, (layers, pools))
    return model.norm(x), pools


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def make(form: str, config: ModelConfig, step: str, backend: str) -> tuple[Callable, tuple[Any, ...]]:
    """Returns a step in that form, its pools the third argument, and what it takes, as shapes."""
    T, S = STEPS[step]
    blocks = S * _CONTEXT // _BLOCK_SIZE
    shape = kv_cache.pool_shape(blocks, config.num_kv_heads, _BLOCK_SIZE, config.head_dim, backend)
    options = {"backend": backend, "decode_only": T == S}
    model = nnx.eval_shape(lambda: registry.resolve(config.model_type).make(config))
    pool, ids = jax.ShapeDtypeStruct(shape, config.dtype), _ints(T)
    batch = AttentionBatch(ids, _ints(S, _CONTEXT // _BLOCK_SIZE), _ints(S), _ints(S + 1), _ints(1))
    if form == "unrolled":
        graph, state = nnx.split(model)

        def unrolled(state, ids, pools, positions, batch):
            return nnx.merge(graph, state)(ids, positions, pools, batch, **options)

        return unrolled, (state, ids, [pool] * config.num_layers, ids, batch)

    layer_def, _ = nnx.split(model.layers[0])
    layers = jax.eval_shape(lambda *x: jax.tree.map(lambda *y: jnp.stack(y), *x), *map(nnx.state, model.layers))
    model.layers = nnx.List([])
    graph, state = nnx.split(model)

    def scanned(states, ids, pools, positions, batch):
        state, layers = states
        return _scan(form, nnx.merge(graph, state), layer_def, layers, ids, positions, pools, batch, **options)

    pools = jax.ShapeDtypeStruct((config.num_layers, *shape), config.dtype)
    return scanned, ((state, layers), ids, pools, ids, batch)


def fill(arguments: tuple[Any, ...], step: str) -> tuple[Any, ...]:
    """Returns arrays for the shapes: a batch whose sequences have _CONTEXT tokens, their new ones the last."""
    T, S = STEPS[step]
    state, _, pools, *_ = arguments
    positions = np.tile(np.arange(_CONTEXT - T // S, _CONTEXT, dtype=np.int32), S)
    tables = np.random.default_rng(0).permutation(S * _CONTEXT // _BLOCK_SIZE).astype(np.int32).reshape(S, -1)
    sequence = np.repeat(np.arange(S), T // S)
    slots = tables[sequence, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    lens, cu = np.full(S, _CONTEXT, np.int32), np.arange(S + 1, dtype=np.int32) * (T // S)
    batch = AttentionBatch(*map(jnp.asarray, (slots, tables, lens, cu, np.array([S], np.int32))))
    state, pools = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), (state, pools))
    return state, jnp.ones(T, jnp.int32), pools, jnp.asarray(positions), batch


def _step_ms(program: Callable, arguments: tuple[Any, ...]) -> float:
    """Returns the median of some calls."""
    state, ids, pools, *rest = arguments
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        x, pools = program(state, ids, pools, *rest)
        x.block_until_ready()
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times))


def rows(config: ModelConfig, chip: str | None) -> Iterator[str]:
    """Yields a row for each step and form, on the device here or for a chip."""
    yield "| platform | step | layers | trace and lower, s | compile, CPU s | temporaries, MiB | aliased | a step, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for step in STEPS:
        for form in FORMS:
            run, arguments = make(form, config, step, "xla" if chip is None else f"tpu:{chip}")
            begin = time.perf_counter()
            if chip is None:
                lowered = jax.jit(run, donate_argnums=2).lower(*arguments)
            else:
                lowered = chips.lower_for(chip, run, *arguments, donate=(2,))
            lower_s, begin = time.perf_counter() - begin, time.process_time()
            program = lowered.compile()
            compile_s = time.process_time() - begin
            memory = program.memory_analysis()
            assert memory is not None  # the compilers of CPU and TPU know
            pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[2]))
            ms = f"{_step_ms(program, fill(arguments, step)):.0f}" if chip is None else ""
            yield (
                f"| {chip or jax.default_backend()} | {step} | {form} | {lower_s:.1f} | {compile_s:.1f} "
                f"| {memory.temp_size_in_bytes >> 20} | {memory.alias_size_in_bytes / pool_bytes:.0%} | {ms} |"
            )


def _main():
    config = RandomCheckpoint(sys.argv[1]).config
    for chip in sys.argv[2:] or [None]:
        for row in rows(config, chip):
            print(row, flush=True)


if __name__ == "__main__":
    _main()
