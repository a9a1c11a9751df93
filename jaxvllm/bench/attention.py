"""`jaxvllm bench attention`: the decode attention of one layer, alone, against the copy bandwidth."""

from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.bench.machine import copy_bandwidth, describe
from jaxvllm.kernels import kv_cache, paged_attention

_NUM_SEQS, _CONTEXT, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 1024, 16, 8, 128, 16
_REPEATS = 30


def measure(dtype: str) -> dict[str, Any]:
    """Returns milliseconds, the best and the median of some calls, and the keys and values read per second."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype={dtype} is none of float32, bfloat16.")
    rng = np.random.default_rng(0)
    blocks_per_seq = _CONTEXT // _BLOCK_SIZE
    shape = kv_cache.pool_shape(2 * _NUM_SEQS * blocks_per_seq, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM, "xla")
    pool = jax.random.normal(jax.random.key(0), shape, dtype)
    q = jax.random.normal(jax.random.key(1), (_NUM_SEQS, _HEADS, _HEAD_DIM), dtype)
    tables = rng.permutation(shape[0])[: _NUM_SEQS * blocks_per_seq].reshape(_NUM_SEQS, -1).astype(np.int32)
    attend = jax.jit(partial(paged_attention.attend, scale=_HEAD_DIM**-0.5, decode_only=True, backend="xla"))
    arguments = (
        q, pool, jnp.asarray(tables), jnp.full(_NUM_SEQS, _CONTEXT, jnp.int32),
        jnp.arange(_NUM_SEQS + 1, dtype=jnp.int32), jnp.array([_NUM_SEQS], jnp.int32),
    )  # fmt: skip
    attend(*arguments).block_until_ready()
    bandwidth = copy_bandwidth()
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        attend(*arguments).block_until_ready()
        times.append(perf_counter() - start)
    num_bytes = 2 * _NUM_SEQS * _CONTEXT * _KV_HEADS * _HEAD_DIM * jnp.dtype(dtype).itemsize
    best, median = float(np.min(times)), float(np.median(times))
    share = num_bytes / best / bandwidth
    return {
        "benchmark": "attention",
        "title": f"decode attention, {_NUM_SEQS} sequences of {_CONTEXT}, {_HEADS}/{_KV_HEADS} heads of 128, {dtype}",
        "summary": f"{1e3 * best:.1f} ms, {num_bytes / best / 1e9:.1f} GB/s of keys and values",
        "machine": describe(),
        "best_ms": round(1e3 * best, 3),
        "median_ms": round(1e3 * median, 3),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "floor_share": round(share, 4),
    }
