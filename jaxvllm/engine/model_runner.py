"""Owns the weights, the KV cache and the compiled steps: scheduled sequences in, sampled token ids out."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32
from tqdm.auto import tqdm

from jaxvllm.config import EngineConfig
from jaxvllm.engine.batch import (
    Bucket,
    choose_bucket,
    make_buckets,
    pack_step,
    packed_fields,
    split_step,
)
from jaxvllm.engine.cache_size import choose_num_blocks
from jaxvllm.engine.stats import HostTimes
from jaxvllm.engine.step import ScheduledStep
from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.paged_attention import AttentionBatch, AttentionForm, resolve_backend
from jaxvllm.kernels.sampling import SamplingBatch, sample
from jaxvllm.models.config import ModelConfig

# More rows than this gain nothing in a CPU's products, and their activations leave its caches: longer prefills run in
# pieces, with less padding and fewer programs to compile.
_CPU_PREFILL_TOKENS = 512


def choose_backend(config: EngineConfig, model_config: ModelConfig, device: Any) -> str:
    """Returns the attention backend for a model on a `jax.Device`, before any weight is loaded.

    Raises `ValueError` where the options ask for more than one chip, or for a backend that cannot run the model there.
    """
    if config.tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size}: this version runs a model on one chip, use 1."
        )
    form = AttentionForm(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.kvcache_block_size,
        dtype=model_config.dtype,
        compute_capability=getattr(device, "compute_capability", None),
        device_kind=device.device_kind,
    )
    return resolve_backend(config.attention_backend, device.platform, form)


class ModelRunner:
    """Runs steps on one device. Every step shape is a bucket, every bucket one program, compiled once.

    The ids that a step samples stay on the device, in an array that is handed from program to program: a decode
    dispatched before they are read takes its tokens from there.

    The pools of the KV cache are donated to each step and replaced by what it returns, so that they are updated in
    place; no other reference to them may be kept.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, model: nnx.Module, backend: str):
        """Allocates the KV cache; raises `ValueError` when the device has no room for one sequence.

        `backend` is that of `choose_backend`.
        """
        device = jax.devices()[0]
        self.backend = backend
        self.model_config = model_config
        self._forbid_recompile = config.forbid_recompile
        self._warm = False
        self._graphdef, state = nnx.split(model)
        # a list: to take the state apart anew for each step would cost a millisecond of Python
        self.params, self._params_tree = jax.tree.flatten(state)
        self._buckets = make_buckets(config, _CPU_PREFILL_TOKENS if device.platform == "cpu" else None)
        self._num_ids = max(bucket.num_seqs for bucket in self._buckets)
        self.times = HostTimes()
        self._programs: dict[Bucket, jax.stages.Compiled] = {}

        self._block_size = config.kvcache_block_size
        self._eos_ids = config.eos_ids

        self.num_blocks = config.num_kvcache_blocks
        if self.num_blocks == -1:
            self.num_blocks = choose_num_blocks(config, device, self._block_bytes(), self._largest_step_bytes)
        self._num_slots = self.num_blocks * self._block_size
        self._kv_cache = self._allocate_cache()
        self._ids = self._no_ids()

    @property
    def num_programs(self) -> int:
        """Compiled steps held; after the warm-up, the number of buckets."""
        return len(self._programs)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def dispatch(self, step: ScheduledStep) -> Int32[Array, " ids"]:
        """Gives one step to the device, without waiting for it; returns its sampled ids, for `read`.

        A pending token of a sequence is read on the device, from the ids of the step dispatched before.
        """
        with self.times.phase("batch"):
            pieces = split_step(step, self._buckets)
        for piece in pieces:
            with self.times.phase("batch"):
                bucket = choose_bucket(self._buckets, piece)
                packed = pack_step(
                    piece,
                    bucket,
                    num_slots=self._num_slots,
                    num_ids=self._num_ids,
                    vocab_size=self.model_config.vocab_size,
                    eos=self._eos_ids,
                )
            with self.times.phase("transfer"):
                packed = jax.device_put(packed)
            with self.times.phase("dispatch"):
                program = self._program(bucket)
                self._ids, self._kv_cache = program(self.params, self._kv_cache, packed, self._ids)
        return self._ids

    def read(self, ids: Int32[Array, " ids"], num_seqs: int) -> list[int]:
        """Waits for a step and returns its ids, one per sequence; the host waits nowhere else."""
        with self.times.phase("wait"):
            ids.block_until_ready()
        with self.times.phase("read"):
            return np.asarray(ids)[:num_seqs].tolist()

    def is_done(self, ids: Int32[Array, " ids"]) -> bool:
        """Whether `read` would return without waiting."""
        return ids.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # jax's stub of Array lacks it

    def restore_cache(self):
        """After a step that failed: allocates the cache anew if the step took it along."""
        try:
            jax.block_until_ready(self._kv_cache)  # raises where it was donated, or comes from a step that failed later
        except (RuntimeError, ValueError):
            self._kv_cache = self._allocate_cache()
            self._ids = self._no_ids()

    def warm_up(self, show_progress: bool = True):
        """Compiles every bucket ahead of time, several at once; XLA leaves Python's lock while it compiles."""
        missing = [bucket for bucket in self._buckets if bucket not in self._programs]
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            tqdm(total=len(missing), desc="Compiling", unit="step", disable=not show_progress) as progress,
        ):
            futures = []
            for bucket in missing:
                future = pool.submit(self._lower(bucket, self._kv_cache).compile)
                future.add_done_callback(lambda _: progress.update())
                futures.append(future)
            for bucket, future in zip(missing, futures, strict=True):
                self._programs[bucket] = future.result()
        self._warm = True

    def _program(self, bucket: Bucket) -> jax.stages.Compiled:
        program = self._programs.get(bucket)
        if program is None:
            if self._warm and self._forbid_recompile:
                raise RuntimeError(f"{bucket} would compile after the warm-up, and forbid_recompile is set.")
            program = self._programs[bucket] = self._lower(bucket, self._kv_cache).compile()
        return program

    def _lower(self, bucket: Bucket, pools: Any) -> jax.stages.Lowered:
        _, words = packed_fields(bucket)
        packed = jax.ShapeDtypeStruct((words,), jnp.int32)
        tree, run = self._params_tree, partial(step, self._graphdef, bucket=bucket, backend=self.backend)

        def step_of_list(params, *arguments):
            return run(tree.unflatten(params), *arguments)

        program = jax.jit(step_of_list, donate_argnums=1)
        return program.lower(self.params, pools, packed, jax.ShapeDtypeStruct((self._num_ids,), jnp.int32))

    def _allocate_cache(self) -> list[Array]:
        dtype = jnp.dtype(self.model_config.dtype)
        return kv_cache.allocate(self.model_config.num_layers, self._pool_shape(self.num_blocks), dtype)

    def _no_ids(self) -> Array:
        return jnp.zeros(self._num_ids, jnp.int32)

    def _pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        model = self.model_config
        return kv_cache.pool_shape(num_blocks, model.num_kv_heads, self._block_size, model.head_dim, self.backend)

    def _block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        size = np.prod(self._pool_shape(1)) * jnp.dtype(self.model_config.dtype).itemsize
        return int(size) * self.model_config.num_layers

    def _largest_step_bytes(self) -> int:
        """Compiles the largest prefill over a small pool; returns the bytes of its temporaries."""
        bucket = max(self._buckets)
        pool = jax.ShapeDtypeStruct(self._pool_shape(bucket.num_blocks), jnp.dtype(self.model_config.dtype))
        memory = self._lower(bucket, [pool] * self.model_config.num_layers).compile().memory_analysis()
        return 0 if memory is None else memory.temp_size_in_bytes


def unpack(packed: Int32[Array, " words"], bucket: Bucket) -> dict[str, Array]:
    """The device's side of `pack_step`: the fields of a step, in their shapes and dtypes."""
    fields, _ = packed_fields(bucket)
    arrays = {}
    for name, field in fields.items():
        words = jax.lax.slice(packed, (field.offset,), (field.offset + int(np.prod(field.shape)),))
        arrays[name] = jax.lax.bitcast_convert_type(words.reshape(field.shape), field.dtype)
    return arrays


def step(
    graphdef: Any,
    params: Any,
    pools: list[Array],
    packed: Int32[Array, " words"],
    ids: Int32[Array, " ids"],
    *,
    bucket: Bucket,
    backend: str,
) -> tuple[Int32[Array, " ids"], list[Array]]:
    """One step: the model over all new tokens, then one sampled id per sequence.

    `pools` is donated: use the returned ones, the argument is dead. A sequence whose prefill goes on in a later step
    gets an id too, which the scheduler drops. `ids` are those sampled before: pending tokens are taken from there, and
    the new ids are returned in it, in their rows.
    """
    fields = unpack(packed, bucket)
    if bucket.decode_only:
        rows = fields["pending_rows"]  # past the end where the token was known to the host
        pending = ids.at[rows].get(mode="clip")
        fields["token_ids"] = jnp.where(rows < ids.shape[0], pending, fields["token_ids"])
    batch = AttentionBatch(*(fields[name] for name in AttentionBatch._fields))
    model = nnx.merge(graphdef, params)
    with jax.named_scope("model"):
        hidden, pools = model(
            fields["token_ids"],
            fields["positions"],
            pools,
            batch,
            backend=backend,
            decode_only=bucket.decode_only,
        )
    with jax.named_scope("head"):
        last = jnp.maximum(batch.cu_seqlens_q[1:] - 1, 0)  # the head runs on each sequence's last token only
        logits = model.logits(hidden[last])
    with jax.named_scope("sample"):
        sampling = SamplingBatch(
            positions=batch.context_lens,  # the position that the sampled token will take
            **{name: fields[name] for name in SamplingBatch._fields if name != "positions"},
        )
        sampled = sample(logits, sampling)
    return ids.at[fields["id_rows"]].set(sampled, mode="drop"), pools
