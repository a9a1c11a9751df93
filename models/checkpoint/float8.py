"""Checkpoints of float8 weights with scales: which there are, and back to the numbers they stand for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES = {"F8_E4M3": jnp.float8_e4m3fn.dtype, "F8_E5M2": jnp.float8_e5m2.dtype}  # by safetensors' names
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # of a weight's name; either way the weight is multiplied by it
_ROWS_AT_ONCE = 1024  # of a weight, while it is dequantised: bounds the float32 copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8:
    """How a checkpoint's float8 weights are scaled: per tensor, per output channel or, with `block`, per block."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale


def read_float8(quantization: Any) -> Float8:
    """Reads a config's `quantization_config`. Raises ValueError, by name, on weights that are no scaled float8."""
    config: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    match config.get("quant_method"):
        case "fp8":
            return Float8(block=_as_block(config.get("weight_block_size"), "weight_block_size"))
        case "compressed-tensors":
            blocks = {_compressed_block(group) for group in (config.get("config_groups") or {}).values()}
            if len(blocks) == 1:
                return Float8(block=blocks.pop())
            raise ValueError(f"config_groups with {len(blocks)} kinds of blocks are not supported: one is.")
        case method:
            raise ValueError(
                f"quantised weights ({method}) are not supported: fp8 and compressed-tensors' float8 are, or use the "
                "unquantised checkpoint."
            )


def dequantize(weight: np.ndarray, scale: np.ndarray, float8: Float8, dtype: np.dtype) -> np.ndarray:
    """Returns `weight` (float8) times its scale, multiplied in float32, in `dtype`.

    The scale is one number, one per output channel, or one per block. Raises ValueError on any other shape.
    """
    scale = scale.astype(np.float32)
    if not np.isfinite(scale).all():
        raise ValueError("its scales are not all finite numbers.")
    per_block = False
    if scale.size == 1:
        scale = scale.reshape(1, 1)
    elif scale.shape in ((len(weight),), (len(weight), 1)):
        scale = scale.reshape(-1, 1)
    elif float8.block is not None and scale.shape == tuple(
        -(-size // part) for size, part in zip(weight.shape, float8.block, strict=True)
    ):
        per_block = True
    else:
        blocks = "no blocks" if float8.block is None else f"blocks of {list(float8.block)}"
        raise ValueError(f"a scale of {list(scale.shape)} does not fit {list(weight.shape)} and {blocks}.")
    values = np.empty(weight.shape, dtype)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, len(weight)))
        if per_block:
            outputs, inputs = float8.block  # pyright: ignore[reportGeneralTypeIssues]  # there is one
            wide = scale[rows // outputs][:, np.arange(weight.shape[1]) // inputs]
        else:
            wide = scale if len(scale) == 1 else scale[rows]
        values[rows[0] : rows[-1] + 1] = weight[rows[0] : rows[-1] + 1].astype(np.float32) * wide
    return values


def _compressed_block(group: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the block of one group of layers, None where it has none."""
    weights = group.get("weights") or {}
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        kind = f"{weights.get('type')} of {weights.get('num_bits')} bits"
        raise ValueError(f"quantised weights (compressed-tensors, {kind}) are not supported: float of 8 bits is.")
    match weights.get("strategy"):
        case "tensor" | "channel":
            return None
        case "block":
            return _as_block(weights.get("block_structure"), "block_structure")
        case strategy:
            raise ValueError(f"float8 scales by strategy={strategy!r} are not supported: tensor, channel, block are.")


def _as_block(value: Any, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise ValueError(f"{name}={value!r} is not two positive whole numbers.")
    return value[0], value[1]
