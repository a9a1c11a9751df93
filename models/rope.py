"""Rotary position embeddings: which frequencies a checkpoint asks for, and turning queries and keys by them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """The frequencies of a model's rotary embedding, as its checkpoint gives them. None: the type has no such value.

    "dynamic" stretches the frequencies only past `max_position_embeddings`, which the engine never passes: up to
    there it is "default". "divisors" is the form of GGUF files, one divisor per frequency.
    """

    rope_type: str
    theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None  # tokens
    divisors: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rope_type not in _REQUIRED:
            raise ValueError(
                f"rotary type {self.rope_type!r} is not supported: the supported ones are {', '.join(_REQUIRED)}."
            )
        if missing := [name for name in _REQUIRED[self.rope_type] if getattr(self, name) is None]:
            raise ValueError(f"rotary type {self.rope_type!r} needs {', '.join(missing)}: the checkpoint gives none.")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} of the rotary embedding is not a positive number.")
        if self.low_freq_factor is not None and self.low_freq_factor == self.high_freq_factor:
            raise ValueError(f"low_freq_factor and high_freq_factor are both {self.low_freq_factor}: they must differ.")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> "RopeConfig":
        """Reads transformers' `rope_parameters`. Raises ValueError, by name, on what is not supported."""
        if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
            factor = parameters["partial_rotary_factor"]
            raise ValueError(f"partial_rotary_factor={factor} is not supported: every model here turns whole heads.")
        if parameters.get("rope_theta") is None:
            raise ValueError("rope_theta is missing: the checkpoint gives none.")
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        values: dict[str, Any] = {name: parameters.get(name) for name in _REQUIRED.get(rope_type, ())}
        for name, value in values.items():
            if name.endswith("factor") and value is not None:
                values[name] = float(value)
        return cls(rope_type=rope_type, theta=float(parameters["rope_theta"]), **values)


_REQUIRED: dict[str, tuple[str, ...]] = {  # rotary type: what it needs beside theta
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "divisors": ("divisors",),
}


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " half_H"]:
    """Returns the turn per position of each pair of numbers, in radians; float32 like the models were trained with.

    Raises ValueError where the divisors do not fit the head size.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "divisors":
        divisors = np.asarray(rope.divisors, np.float32)
        if divisors.shape != frequencies.shape:
            raise ValueError(
                f"{divisors.size} rotary divisors do not fit head_dim={head_dim}: it needs {head_dim // 2}."
            )
        return frequencies / divisors
    return frequencies


def _llama3(frequencies: Float32[np.ndarray, " half_H"], rope: RopeConfig) -> Float32[np.ndarray, " half_H"]:
    """Slows the frequencies whose wave is long against the original context, blending between two bounds."""
    factor, low, high, original = (getattr(rope, name) for name in _REQUIRED["llama3"])
    turns = original * frequencies / np.float32(2 * math.pi)  # within the original context
    share = np.clip((turns - low) / (high - low), 0, 1)  # 0: slowed by the factor, 1: as it was
    return ((1 - share) * frequencies / factor + share * frequencies).astype(np.float32)


def rotary_angles(
    positions: Int32[Array, " T"], rope: RopeConfig, head_dim: int
) -> tuple[Float32[Array, "T 1 half_H"], Float32[Array, "T 1 half_H"]]:
    """Returns cosine and sine of each position's phases, in float32 whatever the model's dtype.

    bfloat16 has no room for a position: it rounds 257 to 256.
    """
    phases = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(phases), jnp.sin(phases)


def rotate(
    x: Float[Array, "T heads H"], cos: Float32[Array, "T 1 half_H"], sin: Float32[Array, "T 1 half_H"]
) -> Float[Array, "T heads H"]:
    """Turns each head's pairs (i, i + H/2) by the phases of its token; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
