"""Times one layer's attention on a GPU: our kernels, the `xla` backend, JAX's Triton kernel and PyTorch's SDPA.

All see the same number of tokens. A decode is measured in bytes per second, the least bytes that it can move over its
time, against the card's own copies; a prefill in operations per second, against the card's own matrix products.
"""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.kernels import paged_attention
from tools.gpu import torch_peer as gpu_torch
from tools.gpu.record import Record
from tools.gpu.timing import calls_for, time_calls
from tools.gpu.workloads import Batches, Workload, make_batches

_CACHE_BYTES = 4 * 50 * 2**20  # of batches that rotate: four times an H200's L2 cache
_TRITON_TILE, _TRITON_SPLITS = 128, (1, 16)  # tokens per step of its loop, and parts of a context: 16 is its default
_REPEATS = 11


def _spread(count: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths evenly random between two bounds, the same every time."""
    return tuple(np.random.default_rng(0).integers(low, high + 1, count).tolist())


_RAGGED, _LONG = _spread(256, 100, 2048), (32_768,) * 16
DECODES = {  # with the goal: the share of the copy bandwidth that our kernel should reach
    "256 sequences of 100 to 2,048": (Workload(context_lens=_RAGGED), 0.85),
    "256 sequences of 100 to 2,048, blocks of 256": (Workload(context_lens=_RAGGED, block_size=256), 0.85),
    "16 sequences of 32,768": (Workload(context_lens=_LONG), 0.75),
    "one of 100,000 beside 63 of 500": (Workload(context_lens=(100_000, *[500] * 63)), None),
}
PREFILLS = {  # with the goal: the share of the matrix rate
    "8,192 tokens, 32 heads": (Workload(context_lens=(8192,), num_new=(8192,), num_heads=32), 0.6),
    "8,192 tokens": (Workload(context_lens=(8192,), num_new=(8192,)), 0.6),
    "16 prompts of 100 to 1,024": (
        Workload(context_lens=_spread(16, 100, 1024), num_new=_spread(16, 100, 1024)),
        None,
    ),
    "a chunk of 2,048 after 30,000": (Workload(context_lens=(32_048,), num_new=(2048,)), None),
}
_COMPARED = ("256 sequences of 100 to 2,048", "16 sequences of 32,768", "8,192 tokens, 32 heads", "8,192 tokens")

TINY_DECODES = {"tiny": (Workload(context_lens=(70, 9), num_heads=2, num_kv_heads=1, head_dim=64), 0.85)}
TINY_PREFILLS = {"tiny": (Workload(context_lens=(40,), num_new=(20,), num_heads=2, num_kv_heads=1, head_dim=64), 0.6)}


def run(record: Record, attend: Callable[..., jax.Array], *, card: dict[str, Any], decode: bool, tiny: bool):
    """Times every workload of one phase; `card` has the rates measured on it, where they could be."""
    workloads = (DECODES if decode else PREFILLS) if not tiny else (TINY_DECODES if decode else TINY_PREFILLS)
    unit, rate = ("bytes_per_s", "copy_bandwidth") if decode else ("flops_per_s", "matrix_rate")
    card_rate = card.get(rate, {}).get(unit)

    for name, (workload, goal) in workloads.items():

        def timed(function, *arguments, workload=workload, goal=None, **options) -> dict[str, Any]:
            # as many batches as cannot all stay in the L2 cache
            copies = 2 if tiny else max(2, -(-_CACHE_BYTES // workload.num_bytes))
            result = function(workload, *arguments, copies=copies, repeats=1 if tiny else _REPEATS, **options)
            if "median_s" in result:
                result[unit] = (workload.num_bytes if decode else workload.flops) / result["median_s"]
                if card_rate:
                    result[f"of_{rate}"] = share = result[unit] / card_rate
                    result |= {"goal": goal, "reached": share >= goal} if goal else {}
            return result

        calls = 1 if tiny else calls_for(workload.num_bytes / 3e12 + workload.flops / 4e14)
        record.run(f"{name}: gpu", timed, time_backend, attend, "gpu", calls=calls, goal=goal)
        if not tiny and name not in _COMPARED:
            continue
        record.run(f"{name}: xla", timed, time_backend, _attend_xla, "xla", calls=max(1, calls // 8))
        if decode:
            for splits in _TRITON_SPLITS[:1] if tiny else _TRITON_SPLITS:
                record.run(f"{name}: triton, {splits} parts", timed, time_triton, splits, calls=calls, interpret=tiny)
        record.run(f"{name}: torch", timed, _time_torch, calls=calls)


def _attend_xla(*arguments: Any, **options: Any) -> jax.Array:
    return paged_attention.attend(*arguments, **options, backend="xla")


def time_backend(
    workload: Workload, attend: Callable[..., jax.Array], backend: str, *, copies: int, calls: int, repeats: int
) -> dict[str, Any]:
    """Times `attend`, one backend's; each answer is the next call's query."""

    def step(i, q, batches: Batches):
        return attend(q, batches.pool, *batches.arguments(i), **workload.options)

    batches = make_batches(workload, backend=backend, copies=copies)
    return time_calls(step, batches.q, batches, calls=calls, repeats=repeats)


def time_triton(
    workload: Workload, splits: int, *, copies: int, calls: int, repeats: int, interpret: bool
) -> dict[str, Any]:
    """Times JAX's own paged attention, deprecated since 0.11. A context is cut into `splits` parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.experimental.pallas.ops.gpu import paged_attention as theirs
        except ImportError as error:
            return {"left_out": f"this version of JAX has none ({error})"}
    H, P = workload.head_dim, workload.block_size
    batches = make_batches(workload, backend="gpu", copies=copies)
    pages = batches.pool.swapaxes(0, 1)  # [K, B, P, 2H]
    keys, values = pages[..., :H], pages[..., -H:]
    pages_per_step = max(1, _TRITON_TILE // P)
    M = batches.tables.shape[2]
    padding = -M % (splits * pages_per_step)
    tables = jnp.pad(batches.tables, ((0, 0), (0, 0), (0, padding)))

    def step(i, q, keys, values, tables, lens):
        r = i % tables.shape[0]
        scaled = q * workload.options["scale"]
        return theirs.paged_attention(
            scaled,
            keys,
            values,
            tables[r],
            lens[r],
            k_splits=splits,
            pages_per_compute_block=pages_per_step,
            interpret=interpret,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return time_calls(step, batches.q, keys, values, tables, batches.lens, calls=calls, repeats=repeats)


def _time_torch(workload: Workload, *, copies: int, calls: int, repeats: int) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"left_out": "torch is not installed"}
    return gpu_torch.time_attention(workload, copies=copies, calls=calls, repeats=repeats)
