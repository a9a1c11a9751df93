"""Times a product with an int8 weight next to the same in bfloat16 and float32, on this machine.

`python -m tools.cpu.int8` prints a table for SmolLM2's and Qwen3-0.6B's feed-forward layers.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxvllm.models.layers import linear
from jaxvllm.models.quantized import QuantizedWeight, quantize

NUM_WEIGHTS = 8  # run through in turn: more than a cache holds, as a model's layers are
_REPEATS = 7


def naive(x: Float[Array, "rows inputs"], weight: QuantizedWeight) -> Float[Array, "rows outputs"]:
    """What `x @ (values * scales).T` alone makes XLA do: a converted copy of the weight first."""
    return linear(x, weight.values.astype(x.dtype)) * weight.scales.astype(x.dtype)


def time_products(num_rows: int, inputs: int, outputs: int) -> dict[str, tuple[float, float]]:
    """Returns the least and the median time of one product in seconds, by form; the forms take turns."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    values, scales = quantize(weight)
    int8 = [QuantizedWeight(jnp.array(values), jnp.array(scales)) for _ in range(NUM_WEIGHTS)]
    wide = {dtype: [jnp.array(weight, dtype) for _ in range(NUM_WEIGHTS)] for dtype in ("float32", "bfloat16")}
    forms = {
        "float32": (linear, "float32", wide["float32"]),
        "bfloat16": (linear, "bfloat16", wide["bfloat16"]),
        "int8": (linear, "bfloat16", int8),
        "int8, converted": (naive, "bfloat16", int8),
    }
    programs = {}
    for name, (product, dtype, weights) in forms.items():
        x = jnp.asarray(rng.standard_normal((num_rows, inputs)), dtype)
        run = jax.jit(lambda x, weights, product=product: [product(x, weight) for weight in weights])
        programs[name] = run.lower(x, weights).compile(), x, weights
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(_REPEATS + 1):
        for name, (run, x, weights) in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(x, weights))
            if repeat:  # the first one touches the memory
                times[name].append((time.perf_counter() - begin) / NUM_WEIGHTS)
    return {name: (min(seconds), statistics.median(seconds)) for name, seconds in times.items()}


def _main():
    for inputs, outputs in ((576, 1536), (1024, 3072)):
        for num_rows in (1, 2, 8, 32, 64, 512):
            times = time_products(num_rows, inputs, outputs)
            cells = (f"{name} {least * 1e6:,.0f}/{typical * 1e6:,.0f}" for name, (least, typical) in times.items())
            print(f"[{outputs}, {inputs}], {num_rows} rows: {'; '.join(cells)} us", flush=True)


if __name__ == "__main__":
    _main()
