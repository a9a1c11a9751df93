"""The forms that the GPU kernels are tested with, and how they run on a CPU: interpreted, races detected."""

import functools
import inspect

import jax
from attention_cases import Form
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxvllm.kernels.gpu import backend as paged_attention_gpu

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")

# two queries per KV head unless said; several copies per tile, one, and parts of a block
FORMS = {
    "bfloat16": Form(
        head_dim=64,
        block_size=16,
        max_tokens=80,
        max_seqs=5,
        max_blocks=10,
        dtype="bfloat16",
        num_heads=4,
        num_kv_heads=2,
    ),
    "wide_heads": Form(
        head_dim=128,
        block_size=64,
        max_tokens=70,
        max_seqs=4,
        max_blocks=3,
        dtype="bfloat16",
        num_heads=2,
        num_kv_heads=1,
    ),
    "float16_windowed": Form(
        head_dim=128,
        block_size=32,
        max_tokens=64,
        max_seqs=4,
        max_blocks=8,
        dtype="float16",
        num_heads=7,
        num_kv_heads=1,
        sliding_window=40,
    ),
    "capped": Form(
        head_dim=64,
        block_size=128,
        max_tokens=24,
        max_seqs=3,
        max_blocks=2,
        dtype="bfloat16",
        num_heads=16,
        num_kv_heads=1,
        logits_soft_cap=3.0,
    ),
    "one_query_large_blocks": Form(
        head_dim=64,
        block_size=256,
        max_tokens=140,
        max_seqs=2,
        max_blocks=2,
        dtype="float16",
        num_heads=2,
        num_kv_heads=2,
    ),
    "widest_heads": Form(
        head_dim=256,
        block_size=16,
        max_tokens=24,
        max_seqs=3,
        max_blocks=8,
        dtype="bfloat16",
        num_heads=3,
        num_kv_heads=1,
        sliding_window=100,
        logits_soft_cap=20.0,
    ),
    "padded_heads": Form(
        head_dim=80,
        block_size=32,
        max_tokens=32,
        max_seqs=3,
        max_blocks=4,
        dtype="bfloat16",
        num_heads=9,
        num_kv_heads=1,
    ),
}

# `num_workers` below what fits the chip, so that pieces of the line hold several sequences and sequences several pieces
attend = functools.partial(paged_attention_gpu.attend, interpret=INTERPRET, num_workers=3)


def attend_without_cache(*arguments, **options) -> jax.Array:
    """As `attend`, traced anew: for code that a test has just changed."""
    untraced = inspect.unwrap(paged_attention_gpu.attend)
    return untraced(*arguments, **options, interpret=INTERPRET, num_workers=3)
