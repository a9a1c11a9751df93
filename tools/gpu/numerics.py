"""The GPU kernels' answers against the reference: fresh random inputs, NaN wherever no token may look."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.kernels import reference
from tools.gpu.record import Record
from tools.gpu.workloads import Workload, make_batches

TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2}  # of the greatest answer, or of 1
_SPARE_ROWS = 3

# decodes, whole prompts, chunks over a prefix, a row without tokens, lengths at and beside the tiles' borders
_LENS = (1, 17, 700, 64, 0, 1500, 129, 256, 1000)
_NEWS = (1, 17, 300, 64, 0, 1, 100, 5, 1)
_MIXED = Workload(context_lens=_LENS, num_new=_NEWS)
FORMS = {
    "16 heads on 8": _MIXED,
    "32 heads on 8, blocks of 64": replace(_MIXED, num_heads=32, block_size=64),
    "9 heads of 64 on 3, float16": replace(_MIXED, num_heads=9, num_kv_heads=3, head_dim=64, dtype="float16"),
    "one head each, windowed": replace(_MIXED, num_heads=4, num_kv_heads=4, block_size=32, sliding_window=300),
    "16 heads on 1, capped, blocks of 256": replace(_MIXED, num_kv_heads=1, block_size=256, logits_soft_cap=20.0),
    "heads of 256, windowed and capped": replace(
        _MIXED, num_heads=8, num_kv_heads=2, head_dim=256, block_size=128, sliding_window=500, logits_soft_cap=30.0
    ),
    "heads of 80, padded": replace(_MIXED, num_heads=4, num_kv_heads=2, head_dim=80),
}
# alone in its batch, a context is cut over many workers
LONG = Workload(context_lens=(30_000, *range(40, 800, 40)), block_size=64)

TINY_FORMS = {
    "2 heads on 1, windowed": Workload(
        context_lens=(70, 33, 1), num_new=(40, 1, 1), num_heads=2, num_kv_heads=1, head_dim=64, sliding_window=50
    )
}


def decode_of(workload: Workload) -> Workload:
    """Returns the decode step over the same contexts."""
    return replace(workload, context_lens=tuple(n for n in workload.context_lens if n), num_new=())


def compare(workload: Workload, attend: Callable[..., jax.Array], seed: int) -> dict[str, Any]:
    """Attends one poisoned batch; returns the largest error over the tolerance's unit, and whether all is well."""
    batches = make_batches(workload, backend="gpu", poison=True, spare_rows=_SPARE_ROWS, seed=seed)
    arguments = batches.arguments(0)
    answer = jax.jit(functools.partial(attend, **workload.options))(batches.q, batches.pool, *arguments)
    oracle = jax.jit(functools.partial(reference.attend, **workload.options))
    wanted = np.asarray(oracle(batches.q.astype(jnp.float32), batches.pool, *arguments))
    num_rows = sum(workload.news)
    got, wanted = np.asarray(answer, np.float32), wanted[:num_rows]
    error = float(np.abs(got[:num_rows] - wanted).max() / max(1.0, np.abs(wanted).max()))
    padding_is_zero = not got[num_rows:].any()
    return {
        "off_by": error if np.isfinite(error) else "nan: something was read that no token may see",
        "tolerance": TOLERANCE[workload.dtype],
        "padding_is_zero": padding_is_zero,
        "passed": error <= TOLERANCE[workload.dtype] and padding_is_zero,
    }


def run(record: Record, attend: Callable[..., jax.Array], *, seed: int, tiny: bool):
    """Checks every form, in a mixed batch and in a decode step."""
    for name, workload in (TINY_FORMS if tiny else FORMS).items():
        record.run(f"{name}: decode", compare, decode_of(workload), attend, seed)
        record.run(f"{name}: mixed", compare, workload, attend, seed + 1)
    if not tiny:
        record.run("one context of 30,000 beside short ones: decode", compare, LONG, attend, seed)


def passed(results: dict[str, dict[str, Any]]) -> bool:
    """Whether every check came to an end and agreed."""
    return bool(results) and all(result.get("passed") for result in results.values())
