"""Counts the bytes and operations of the GPU kernels, as their loops take them: python -m tools.gpu.count.

Nothing is run or compiled. The floor is each live key and value once, queries and answers (`Workload.num_bytes`), and
the operations of the pairs of tokens that see each other (`Workload.flops`).
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxvllm.kernels.gpu import decode_plan as gpu_decode_plan
from jaxvllm.kernels.gpu import prefill_plan as gpu_prefill_plan
from jaxvllm.kernels.gpu.common import HOPPER
from tools.gpu.workloads import Workload

_TILE = 64  # of decode
_FLOAT32 = 4  # bytes


def count_decode(workload: Workload) -> dict[str, float]:
    """Walks the line of tiles of a decode step; `_over_floor` are ratios, `parts` the answers to combine per KV head.

    `hbm_bytes` counts a piece of a block once: fetched again to fill a tile, it comes out of the L2 cache.
    """
    w = workload
    N, K, H = w.num_heads, w.num_kv_heads, w.head_dim
    cols, itemsize = 8 * -(-(N // K) // 8), jnp.dtype(w.dtype).itemsize
    ring = gpu_decode_plan.choose_ring(w.block_size, _TILE, _TILE * 2 * H * itemsize)
    smem_bytes = (ring.slots * _TILE * 2 * H + cols * (H + _TILE)) * itemsize
    workers = gpu_decode_plan.workers_that_fit(HOPPER, K, smem_bytes)
    lens = jnp.array(w.context_lens, jnp.int32)
    plan = gpu_decode_plan.make_plan(lens > 0, lens, tile=_TILE, num_workers=workers, sliding_window=w.sliding_window)
    parts = int(np.sum(np.asarray(plan.last) - np.asarray(plan.first)))

    row_bytes = K * 2 * H * itemsize
    copied = row_bytes * ring.tile * int(plan.starts[-1])
    distinct = row_bytes * sum(-(-n // ring.rows) * ring.rows for n in w.context_lens)
    part_bytes = 2 * parts * K * (H + 1) * cols * _FLOAT32  # written, then read
    io_bytes = parts * K * cols * H * itemsize + sum(w.news) * N * H * itemsize
    flops = 4 * K * cols * H * ring.tile * int(plan.starts[-1])
    return {
        "workers": workers * K,
        "tiles_per_worker": int(plan.bounds[1]),
        "parts": parts,
        "copied_over_floor": (copied + part_bytes + io_bytes) / w.num_bytes,
        "hbm_over_floor": (distinct + part_bytes + io_bytes) / w.num_bytes,
        "parts_over_floor": part_bytes / w.num_bytes,
        "flops_over_floor": flops / w.flops,
    }


def count_prefill(workload: Workload) -> dict[str, float]:
    """Walks the query tiles of a prefill; the bytes of K and V that they copy, mostly out of the L2 cache."""
    w = workload
    N, K, H = w.num_heads, w.num_kv_heads, w.head_dim
    ring = gpu_prefill_plan.choose_ring(w.block_size, H)
    tokens = gpu_prefill_plan.query_tokens(N // K)
    cu = np.cumsum([0, *w.news])
    tiles = 0
    for token in range(0, cu[-1], tokens):
        for s, (context, new) in enumerate(w.pairs):
            begin, end = max(cu[s], token), min(cu[s + 1], token + tokens)
            if begin < end and new > 1:
                tiles += -(-(end + context - cu[s + 1]) // ring.tile)
    rows = gpu_prefill_plan.COMPUTE_GROUPS * gpu_prefill_plan.ROWS
    return {
        "thread_blocks": -(-cu[-1] // tokens) * K,
        "copied_bytes": tiles * K * ring.tile * 2 * H * jnp.dtype(w.dtype).itemsize,
        "flops_over_floor": 4 * tiles * K * rows * ring.tile * H / w.flops,
    }


def nano() -> Workload:
    """NanoVLLM's benchmark workload in the middle of a run: 256 contexts of 100 to 1,024 tokens, Qwen3-0.6B's heads."""
    return Workload(context_lens=tuple(np.random.default_rng(0).integers(100, 1025, 256).tolist()))


def main():
    for block_size in (16, 64, 256):
        counts = count_decode(replace(nano(), block_size=block_size))
        print(f"decode, nano, blocks of {block_size}: " + ", ".join(f"{k} {v:.4g}" for k, v in counts.items()))
    for heads in (16, 32):
        counts = count_prefill(Workload(context_lens=(8192,), num_new=(8192,), num_heads=heads))
        print(f"prefill, 8,192 tokens, {heads} heads: " + ", ".join(f"{k} {v:.4g}" for k, v in counts.items()))


if __name__ == "__main__":
    main()
