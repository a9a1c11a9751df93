"""Reads compiled programs: which whole weights they hold in a float dtype."""

import re

import jax


def wide_weights(compiled: jax.stages.Compiled, shape: tuple[int, int]) -> list[str]:
    """Returns the instructions that make a float array of a weight's shape, or its transpose's, in memory.

    What a fusion holds in registers is none: only instructions outside fused computations are.
    """
    text = compiled.as_text()
    assert text is not None
    rows, columns = shape
    pattern = re.compile(rf"= (?:f32|bf16|f16)\[(?:{rows},{columns}|{columns},{rows})\]\S* (?!parameter)")
    found, fused = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            fused = "fused_computation" in line.split("(")[0]
        elif not fused and pattern.search(line):
            found.append(line.strip())
    return found
