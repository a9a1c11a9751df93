"""Compiles an engine's steps for a TPU that is not there: whether they compile, and what memory they take.

For a deployment before it is paid for, and for tests. A model is its config: no weights are read.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.chips import find_chip, lower_for
from jaxvllm.config import EngineConfig
from jaxvllm.engine.batch import Bucket, packed_fields
from jaxvllm.engine.model_runner import step as engine_step
from jaxvllm.info import CACHE_SHARE
from jaxvllm.kernels import kv_cache
from jaxvllm.models import registry
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.loader import read_config


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One compiled step. `pool_bytes` is the cache in it, all layers: it aliases fully when alias_bytes is as much."""

    name: str
    compile_s: float
    argument_bytes: int
    alias_bytes: int
    pool_bytes: int
    temp_bytes: int
    hbm_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.hbm_bytes


def parse_chip(spec: str) -> str:
    """Returns the chip of "v6e-1". Raises ValueError for several chips: steps are not sharded yet."""
    name, _, count = spec.rpartition("-")
    find_chip(name)
    if count != "1":
        raise ValueError(f"chip {spec!r}: this version compiles for one chip, use {name}-1.")
    return name


def compile_steps(chip_spec: str, path: Path, config: EngineConfig) -> Iterator[StepReport]:
    """Compiles the largest prefill and the largest decode of an engine, one after the other."""
    chip = parse_chip(chip_spec)
    model_config = read_config(path)
    limit = config.max_num_batched_tokens
    M = config.max_blocks_per_seq
    for name, bucket in (
        ("prefill", Bucket(limit, config.max_num_seqs, M, False)),
        ("decode", Bucket(config.max_num_seqs, config.max_num_seqs, M, True)),
    ):
        yield _compile_step(f"{name} {bucket.num_tokens} tokens", chip, bucket, model_config, config)


def _compile_step(name: str, chip: str, bucket: Bucket, model: ModelConfig, config: EngineConfig) -> StepReport:
    architecture = registry.resolve(model.model_type)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: architecture.make(model)))
    dtype = jnp.dtype(model.dtype)
    hbm_bytes = find_chip(chip).hbm_bytes
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))

    def pools(num_blocks: int) -> tuple[list[jax.ShapeDtypeStruct], int]:
        shape = kv_cache.pool_shape(num_blocks, model.num_kv_heads, config.kvcache_block_size, model.head_dim, "tpu")
        size = int(np.prod(shape)) * dtype.itemsize * model.num_layers
        return [jax.ShapeDtypeStruct(shape, dtype)] * model.num_layers, size

    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        room = int(CACHE_SHARE * hbm_bytes) - weight_bytes
        num_blocks = max(room // pools(1)[1], bucket.num_blocks)  # what cannot fit is compiled with one sequence's
    cache, pool_bytes = pools(num_blocks)
    _, words = packed_fields(bucket)
    packed = jax.ShapeDtypeStruct((words,), jnp.int32)
    begin = time.perf_counter()
    step = partial(engine_step, graphdef, bucket=bucket, backend="tpu")
    memory = lower_for(chip, step, params, cache, packed, donate=(1,)).compile().memory_analysis()
    assert memory is not None  # the TPU's compiler knows
    return StepReport(
        name=name,
        compile_s=time.perf_counter() - begin,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        pool_bytes=pool_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        hbm_bytes=hbm_bytes,
    )
