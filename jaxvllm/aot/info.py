"""What a model is and what it needs, from its config alone: no weight is read, none need be there."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.aot import gpu_chips
from jaxvllm.aot.chips import CHIPS as TPUS
from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.paged_attention import AttentionForm, resolve_backend
from jaxvllm.models import registry
from jaxvllm.models.checkpoint.loader import quantizable
from jaxvllm.models.config import ModelConfig

# Of a chip's memory for weights and cache; the rest is for the runtime and for a step's temporaries. An engine on the
# chip measures them instead.
CACHE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A model's size. Bytes are those of the weights as loaded: in `dtype`, the layers' products in int8 if asked."""

    config: ModelConfig
    num_parameters: int
    weight_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What one chip holds beside the weights. `num_blocks` is below 1 where the weights alone are too much."""

    chip: str
    memory_bytes: int
    backend: str
    kv_bytes_per_token: int  # all layers, heads padded to what the backend's tiles need
    num_blocks: int
    num_seqs: int  # of the length asked about, at once
    least_chips: int  # of that kind whose shares hold the weights and one sequence


def describe(config: ModelConfig, quantization: str = "auto") -> ModelInfo:
    """Counts a model's parameters and bytes. Raises ValueError on an architecture that is not supported."""
    architecture = registry.resolve(config.model_type)
    model = nnx.eval_shape(lambda: architecture.make(config))
    to_int8 = quantizable(model) if quantization == "int8" else frozenset()
    num_parameters = weight_bytes = 0
    for keys, param in nnx.to_flat_state(nnx.state(model)):
        num_parameters += param.size
        if ".".join(map(str, keys)) in to_int8:
            weight_bytes += param.size + 4 * param.shape[0]  # and a float32 scale per output channel
        else:
            weight_bytes += param.size * param.dtype.itemsize
    return ModelInfo(config=config, num_parameters=num_parameters, weight_bytes=weight_bytes)


def chip_names() -> list[str]:
    return [*TPUS, *gpu_chips.CHIPS]


def fits(info: ModelInfo, chips: list[str], *, length: int, block_size: int) -> Iterator[Fit]:
    """Says of each chip what it holds of sequences of `length` tokens. Raises ValueError on a chip that is none."""
    for chip in chips:
        memory_bytes, platform, capability = _chip(chip)
        model = info.config
        form = AttentionForm(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            dtype=model.dtype,
            compute_capability=capability,
        )
        backend = resolve_backend("auto", platform, form)
        shape = kv_cache.pool_shape(1, model.num_kv_heads, block_size, model.head_dim, backend)
        block_bytes = int(np.prod(shape)) * jnp.dtype(model.dtype).itemsize * model.num_layers
        room = int(CACHE_SHARE * memory_bytes)
        blocks_per_seq = -(-length // block_size)
        num_blocks = (room - info.weight_bytes) // block_bytes
        yield Fit(
            chip=chip,
            memory_bytes=memory_bytes,
            backend=backend,
            kv_bytes_per_token=block_bytes // block_size,
            num_blocks=num_blocks,
            num_seqs=max(0, num_blocks // blocks_per_seq),
            least_chips=-(-(info.weight_bytes + blocks_per_seq * block_bytes) // room),
        )


def _chip(name: str) -> tuple[int, str, str | None]:
    """Returns a chip's bytes of memory, JAX's name of its platform and, of a GPU, its compute capability."""
    if name in TPUS:
        return TPUS[name].hbm_bytes, "tpu", None
    if name not in chip_names():
        raise ValueError(f"chip {name!r} is none of {', '.join(chip_names())}.")
    return gpu_chips.memory_bytes(name), "gpu", gpu_chips.compute_capability(name)
