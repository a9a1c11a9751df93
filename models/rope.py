"""Rotary position embeddings: which frequencies a checkpoint asks for, and turning queries and keys by them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

Angles = tuple[Float32[Array, "T 1 half_R"], Float32[Array, "T 1 half_R"]]  # cosines and sines; R numbers are turned


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """The frequencies of a rotary embedding, as the checkpoint gives them. None: the type has no such value.

    "dynamic" stretches the frequencies only past `max_position_embeddings`, which the engine never passes: up to
    there it is "default". "longrope" has one set of divisors for sequences up to the original context and one for
    longer ones. "divisors" is the form of Llama 3 in GGUF files, one divisor per frequency.
    """

    rope_type: str
    theta: float
    rotary_share: float = 1.0  # of each head, from its first number on; a config that says nothing turns all of it
    attention_factor: float = 1.0  # of cosines and sines; only yarn and longrope have another one
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None  # turns within the original context above which a frequency stays
    beta_slow: float | None = None  # and below which it is slowed by the whole factor
    truncate: bool | None = None  # whether the bounds of that ramp are whole numbers
    original_max_position_embeddings: int | None = None  # tokens
    divisors: tuple[float, ...] | None = None
    short_divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rope_type not in _REQUIRED:
            raise ValueError(
                f"rotary type {self.rope_type!r} is not supported: the supported ones are {', '.join(_REQUIRED)}."
            )
        if missing := [name for name in _REQUIRED[self.rope_type] if getattr(self, name) is None]:
            raise ValueError(f"rotary type {self.rope_type!r} needs {', '.join(missing)}: the checkpoint gives none.")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} of the rotary embedding is not a positive number.")
        if not 0 < self.rotary_share <= 1:
            raise ValueError(f"partial_rotary_factor={self.rotary_share} is not between 0 and 1.")
        if self.low_freq_factor is not None and self.low_freq_factor == self.high_freq_factor:
            raise ValueError(f"low_freq_factor and high_freq_factor are both {self.low_freq_factor}: they must differ.")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], *, max_position_embeddings: int) -> "RopeConfig":
        """Reads transformers' `rope_parameters` of one kind of layer. Raises ValueError, by name, on what is missing.

        yarn and longrope leave values out that transformers derives: its rules are followed here.
        """
        if parameters.get("rope_theta") is None:
            raise ValueError("rope_theta is missing: the checkpoint gives none.")
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        share = parameters.get("partial_rotary_factor")
        values: dict[str, Any] = {_OUR_NAMES.get(name, name): value for name, value in parameters.items()}
        if rope_type in _DERIVES:
            values |= _DERIVES[rope_type](values, max_position_embeddings)
        taken: dict[str, Any] = {name: values.get(name) for name in _REQUIRED.get(rope_type, ())}
        for name, value in taken.items():
            if isinstance(value, list):
                taken[name] = tuple(map(float, value))
            elif name in _FLOATS and value is not None:
                taken[name] = float(value)
        return cls(
            rope_type=rope_type,
            theta=float(parameters["rope_theta"]),
            rotary_share=1.0 if share is None else float(share),
            **taken,
        )


_REQUIRED: dict[str, tuple[str, ...]] = {  # rotary type: what it needs beside theta
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "original_max_position_embeddings",
    ),
    "longrope": ("short_divisors", "long_divisors", "attention_factor", "original_max_position_embeddings"),
    "divisors": ("divisors",),
}
_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_POSITIVE = ("theta", "original_max_position_embeddings", *_FLOATS)
_OUR_NAMES = {"short_factor": "short_divisors", "long_factor": "long_divisors"}


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Returns what yarn multiplies cosines and sines by: 1 + log(factor) / 10, or the ratio of two such terms."""

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))


def _derive_yarn(values: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    original = values.get("original_max_position_embeddings") or max_position_embeddings
    factor = values.get("factor") or max_position_embeddings / original
    return {
        "original_max_position_embeddings": original,
        "factor": factor,
        "beta_fast": values.get("beta_fast") or 32,  # the defaults of yarn's paper, which published configs leave out
        "beta_slow": values.get("beta_slow") or 1,
        "truncate": values.get("truncate", True),
        "attention_factor": values.get("attention_factor")
        or yarn_attention_factor(factor, values.get("mscale"), values.get("mscale_all_dim")),
    }


def _derive_longrope(values: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    original = values.get("original_max_position_embeddings") or max_position_embeddings
    factor = values.get("factor") or max_position_embeddings / original
    return {
        "original_max_position_embeddings": original,
        "attention_factor": values.get("attention_factor") or longrope_attention_factor(factor, original),
    }


_DERIVES = {"yarn": _derive_yarn, "longrope": _derive_longrope}


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_len: int) -> Float32[np.ndarray, " half_R"]:
    """Returns the turn per position of each pair of numbers, in radians; float32 like the models were trained with.

    `max_len` is the longest sequence served, in tokens: longrope's frequencies depend on it. Raises ValueError where
    the divisors do not fit the head size.
    """
    rotary_dim = int(head_dim * rope.rotary_share)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, rotary_dim)
    divisors = rope.divisors
    if rope.rope_type == "longrope":
        assert rope.original_max_position_embeddings is not None  # the config has checked it
        divisors = rope.long_divisors if max_len > rope.original_max_position_embeddings else rope.short_divisors
    if divisors is not None:
        if len(divisors) != frequencies.size:
            raise ValueError(
                f"{len(divisors)} rotary divisors do not fit head_dim={head_dim}: it needs {frequencies.size}."
            )
        return frequencies / np.asarray(divisors, np.float32)
    return frequencies


def _llama3(frequencies: Float32[np.ndarray, " half_R"], rope: RopeConfig) -> Float32[np.ndarray, " half_R"]:
    """Slows the frequencies whose wave is long against the original context, blending between two bounds."""
    factor, low, high, original = (getattr(rope, name) for name in _REQUIRED["llama3"])
    turns = original * frequencies / np.float32(2 * math.pi)  # within the original context
    share = np.clip((turns - low) / (high - low), 0, 1)  # 0: slowed by the factor, 1: as it was
    return ((1 - share) * frequencies / factor + share * frequencies).astype(np.float32)


def _yarn(
    frequencies: Float32[np.ndarray, " half_R"], rope: RopeConfig, rotary_dim: int
) -> Float32[np.ndarray, " half_R"]:
    """Slows the frequencies that turn little within the original context, on a ramp over their numbers."""
    factor, fast, slow, truncate, _, original = (getattr(rope, name) for name in _REQUIRED["yarn"])

    def number_with(turns: float) -> float:
        """The number of the frequency, a fraction, that turns so often within the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = number_with(fast), number_with(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001  # a ramp without width is a step
    slowed = np.clip((np.arange(frequencies.size, dtype=np.float32) - first) / np.float32(width), 0, 1)
    return (slowed * (frequencies / np.float32(factor)) + (1 - slowed) * frequencies).astype(np.float32)


def rotary_angles(positions: Int32[Array, " T"], rope: RopeConfig, head_dim: int, max_len: int) -> Angles:
    """Returns cosine and sine of each position's phases, in float32 whatever the model's dtype.

    bfloat16 has no room for a position: it rounds 257 to 256. `max_len` as in `inverse_frequencies`.
    """
    phases = positions.astype(jnp.float32)[:, None, None] * inverse_frequencies(rope, head_dim, max_len)
    return jnp.cos(phases) * rope.attention_factor, jnp.sin(phases) * rope.attention_factor


def rotate(
    x: Float[Array, "T heads H"], cos: Float32[Array, "T 1 half_R"], sin: Float32[Array, "T 1 half_R"]
) -> Float[Array, "T heads H"]:
    """Turns the pairs (i, i + R/2) of each head's first R numbers by the phases of its token; the others stay.

    Computed in float32, returned in x's dtype.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)
