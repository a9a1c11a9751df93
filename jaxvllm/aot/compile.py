"""Compiles an engine's steps for chips that are not there: whether they compile, and what memory they take.

For a deployment before it is paid for, and for tests. A model is its config: no weights are read.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.aot import chips, gpu_chips
from jaxvllm.aot.info import CACHE_SHARE
from jaxvllm.config import EngineConfig
from jaxvllm.engine.batch import Bucket, packed_fields
from jaxvllm.engine.model_runner import step as engine_step
from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.paged_attention import CHIP_AXIS, AttentionForm, resolve_backend
from jaxvllm.models import registry
from jaxvllm.models.checkpoint.loader import read_config
from jaxvllm.models.config import ModelConfig

# Which axis of a weight [out, in] several chips share: heads, feed-forward numbers and the vocabulary.
_SHARED_AXIS = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "embed": 0, "head": 0, "o": 1, "down": 1}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One or several chips of a kind, none of which need be here."""

    name: str
    platform: str  # "tpu" or "gpu"
    mesh: Mesh
    device_kind: str
    hbm_bytes: int  # of one chip

    @property
    def num_chips(self) -> int:
        return self.mesh.size


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One compiled step, in bytes of one chip. `pool_bytes` is the cache in it, all layers, which aliases fully when
    `alias_bytes` is as much. Where the compiler gave up for want of memory, `refusal` is its word, alias and
    temporaries are 0 and the arguments counted from their shapes."""

    name: str
    backend: str
    compile_s: float
    argument_bytes: int
    alias_bytes: int
    pool_bytes: int
    temp_bytes: int
    hbm_bytes: int
    refusal: str | None = None

    @property
    def needed_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes

    @property
    def fits(self) -> bool:
        return self.refusal is None and self.needed_bytes <= self.hbm_bytes


def find_target(spec: str) -> Target:
    """Returns the chips of "v6e-1" or "h100-4". Raises ValueError with those there are, or with what is missing."""
    name, _, count = spec.rpartition("-")
    known = {**dict.fromkeys(chips.CHIPS, "tpu"), **dict.fromkeys(gpu_chips.CHIPS, "gpu")}
    if name not in known or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"chip {spec!r} is none of {', '.join(known)} with a number of chips behind, as in v6e-1.")
    if known[name] == "tpu":
        mesh, hbm_bytes = chips.mesh_of(name, int(count)), chips.find_chip(name).hbm_bytes
    else:
        mesh, hbm_bytes = gpu_chips.mesh_of(name, int(count)), gpu_chips.memory_bytes(name)
    kind = mesh.devices.flat[0].device_kind
    return Target(name=spec, platform=known[name], mesh=mesh, device_kind=kind, hbm_bytes=hbm_bytes)


def compile_steps(chip: str, path: Path, config: EngineConfig) -> Iterator[StepReport]:
    """Compiles the largest prefill and the largest decode of an engine, one after the other."""
    target = find_target(chip)
    model_config = read_config(path)
    if model_config.experts is not None and target.num_chips > 1:
        raise ValueError(f"{chip}: mixtures of experts are not shared out to several chips yet, use one.")
    limit = config.max_num_batched_tokens
    M = config.max_blocks_per_seq
    for name, bucket in (
        ("prefill", Bucket(limit, config.max_num_seqs, M, False)),
        ("decode", Bucket(config.max_num_seqs, config.max_num_seqs, M, True)),
    ):
        yield _compile_step(f"{name} {bucket.num_tokens} tokens", target, bucket, model_config, config)


def _compile_step(name: str, target: Target, bucket: Bucket, model: ModelConfig, config: EngineConfig) -> StepReport:
    backend = _backend_of(target, model, config)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: registry.resolve(model.model_type).make(model)))
    params = jax.tree_util.tree_map_with_path(partial(_share_weight, target.mesh), params)
    cache, pool_bytes = _pools(target, bucket, model, config, backend, params)
    _, words = packed_fields(bucket)
    packed = jax.ShapeDtypeStruct((words,), jnp.int32)
    ids = jax.ShapeDtypeStruct((config.max_num_seqs,), jnp.int32)
    step = partial(engine_step, graphdef, bucket=bucket, backend=backend)
    report = partial(StepReport, name=name, backend=backend, pool_bytes=pool_bytes, hbm_bytes=target.hbm_bytes)
    begin = time.perf_counter()
    lowered = chips.lower_on(target.mesh, step, params, cache, packed, ids, donate=(1,))
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "CompileTimeHbmOom" not in str(error):
            raise
        return report(
            compile_s=time.perf_counter() - begin,
            argument_bytes=sum(map(_bytes_on_a_chip, jax.tree.leaves((params, cache)))),
            alias_bytes=0,
            temp_bytes=0,
            refusal=str(error).splitlines()[0],
        )
    assert memory is not None  # these compilers know
    return report(
        compile_s=time.perf_counter() - begin,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def _backend_of(target: Target, model: ModelConfig, config: EngineConfig) -> str:
    form = AttentionForm(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.kvcache_block_size,
        dtype=model.dtype,
        compute_capability=getattr(target.mesh.devices.flat[0], "compute_capability", None),
        device_kind=target.device_kind,
    )
    return resolve_backend(config.attention_backend, target.platform, form)


def _share_weight(mesh: Mesh, path: tuple[Any, ...], weight: Any) -> jax.ShapeDtypeStruct:
    """Gives a weight to the chips: shared out along the axis that its layer's name says, or whole on each."""
    names = [str(getattr(key, "key", key)) for key in path]
    axis = next((_SHARED_AXIS[name] for name in reversed(names) if name in _SHARED_AXIS), None)
    spec = PartitionSpec()
    if axis is not None and axis < weight.ndim and weight.shape[axis] % mesh.size == 0:
        spec = PartitionSpec(*[None] * axis, CHIP_AXIS)
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=NamedSharding(mesh, spec))


def _bytes_on_a_chip(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def _pools(
    target: Target, bucket: Bucket, model: ModelConfig, config: EngineConfig, backend: str, params: Any
) -> tuple[list[jax.ShapeDtypeStruct], int]:
    """Returns the cache's pools, and the bytes of them on a chip: what fits beside the weights, or was asked for."""
    dtype = jnp.dtype(model.dtype)
    heads = NamedSharding(target.mesh, PartitionSpec(None, CHIP_AXIS))

    def pool(num_blocks: int) -> jax.ShapeDtypeStruct:
        shape = kv_cache.pool_shape(num_blocks, model.num_kv_heads, config.kvcache_block_size, model.head_dim, backend)
        if model.num_kv_heads % target.num_chips:
            raise ValueError(
                f"{model.num_kv_heads} KV heads cannot be shared out to {target.num_chips} chips: "
                "take a number of chips that divides them."
            )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=heads)

    num_blocks = config.num_kvcache_blocks
    if num_blocks == -1:
        weight_bytes = sum(_bytes_on_a_chip(x) for x in jax.tree.leaves(params))
        room = int(CACHE_SHARE * target.hbm_bytes) - weight_bytes
        # where nothing fits the step is compiled all the same, with one sequence's
        num_blocks = max(room // (_bytes_on_a_chip(pool(1)) * model.num_layers), bucket.num_blocks)
    one = pool(num_blocks)
    return [one] * model.num_layers, _bytes_on_a_chip(one) * model.num_layers
