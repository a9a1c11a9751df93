"""Times on a GPU without its profiler: loops inside one program, and what the card itself reaches.

A program runs the work `calls` times in a `fori_loop` whose trip count is known, so that the host takes no part. The
result of one call is an operand of the next, and the other operands rotate with the call, so that nothing is hoisted,
shared or left in the L2 cache. What starting a program costs is spread over its calls: make them last 20 ms.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOOP_S = 0.02  # what one timed program should last


def calls_for(expected_s: float) -> int:
    """Returns the calls that make a loop of `LOOP_S`."""
    return max(1, min(1000, round(LOOP_S / max(expected_s, 1e-6))))


def time_calls(
    step: Callable[..., jax.Array], carry: jax.Array, *operands: Any, calls: int, repeats: int
) -> dict[str, Any]:
    """Times `carry = step(i, carry, *operands)`; returns seconds per call: the median of `repeats` loops, and extremes.

    Compiles, and runs once before the clock starts.
    """

    def loop(carry, *operands):
        return jax.lax.fori_loop(0, calls, lambda i, carry: step(i, carry, *operands), carry)

    begin = time.perf_counter()
    program = jax.jit(loop).lower(carry, *operands).compile()
    compile_s = time.perf_counter() - begin
    jax.block_until_ready(program(carry, *operands))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(program(carry, *operands))
        seconds.append((time.perf_counter() - begin) / calls)
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "calls": calls,
        "repeats": repeats,
        "compile_s": compile_s,
    }


def copy_bandwidth(num_bytes: int, repeats: int = 11) -> dict[str, Any]:
    """Measures a copy of an array of `num_bytes`: bytes read and written, per second."""
    x = jnp.zeros(num_bytes // 4, jnp.int32)
    timed = time_calls(lambda i, x: x + i, x, calls=calls_for(2 * num_bytes / 4e12), repeats=repeats)
    return {"bytes_per_s": 2 * num_bytes / timed["median_s"], **timed}


def matrix_rate(size: int, repeats: int = 11) -> dict[str, Any]:
    """Measures the product of two bfloat16 matrices [size, size] by the vendor's library: operations per second."""
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    b = b * size**-0.5  # keeps the products' size
    flops = 2 * size**3
    timed = time_calls(lambda i, a, b: a @ b, a, b, calls=calls_for(flops / 7e14), repeats=repeats)
    return {"flops_per_s": flops / timed["median_s"], **timed}
