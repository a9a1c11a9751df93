"""Paged attention on a GPU: Pallas kernels on Mosaic GPU, for Hopper.

A sequence with one new token goes through `gpu_decode`, bound by memory; one with more through `gpu_prefill`,
bound by the tensor cores; a batch may hold both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.gpu import decode as gpu_decode
from jaxvllm.kernels.gpu import prefill as gpu_prefill
from jaxvllm.kernels.paged_attention import AttentionForm

write = kv_cache.write

HEAD_DIMS = (64, 128, 256)  # as padded
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_GROUP = 16
DTYPES = ("bfloat16", "float16")


def why_unsupported(form: AttentionForm) -> str | None:
    """Returns why the kernels cannot take a model on a GPU, in a sentence, or None."""
    capability = form.compute_capability
    if capability is not None and capability.split(".")[0] != "9":
        return f"the GPU kernels use Hopper's TMA and wgmma, and this GPU has compute capability {capability}."
    if form.dtype not in DTYPES:
        return f"dtype={form.dtype} is none of {', '.join(DTYPES)}, which the GPU kernels multiply."
    if kv_cache.padded_head_dim(form.head_dim, "gpu") not in HEAD_DIMS:
        return f"head_dim={form.head_dim} is above {HEAD_DIMS[-1]}, the GPU kernels' limit."
    if form.num_heads > MAX_GROUP * form.num_kv_heads:
        return (
            f"{form.num_heads} query heads for {form.num_kv_heads} KV heads are more than {MAX_GROUP} each, "
            "the GPU kernels' limit."
        )
    if form.block_size not in BLOCK_SIZES:
        return f"kvcache_block_size={form.block_size} is none of {BLOCK_SIZES}, which the GPU kernels copy."
    return None


@functools.partial(
    jax.jit,
    static_argnames=("scale", "sliding_window", "logits_soft_cap", "decode_only", "num_workers", "interpret"),
)
def attend(
    q: Float[Array, "T N H"],
    pool: Float[Array, "B K P two_Hp"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    cu_seqlens_q: Int32[Array, " S+1"],
    num_seqs: Int32[Array, " 1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    decode_only: bool = False,
    num_workers: int | None = None,
    interpret: Any = False,
) -> Float[Array, "T N H"]:
    """See `paged_attention.attend`. `num_workers` (per KV head) and `interpret` are for tests."""
    T, N, H = q.shape
    S, M = block_tables.shape
    reason = why_unsupported(AttentionForm(N, pool.shape[1], H, pool.shape[2], str(pool.dtype)))
    if reason is not None:
        raise ValueError(reason)
    options: dict[str, Any] = {
        "scale": scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "interpret": interpret,
    }
    padded_head = pool.shape[3] // 2
    rows = jnp.pad(q, ((0, 0), (0, 0), (0, padded_head - H))).astype(pool.dtype)
    lens = jnp.clip(context_lens, 0, M * pool.shape[2])
    cu = jnp.minimum(cu_seqlens_q, cu_seqlens_q[num_seqs[0]])
    num_new = jnp.diff(cu)
    decodes = (num_new == 1) & (lens > 0)
    if decode_only:
        out = gpu_decode.decode(rows, pool, block_tables, lens, decodes, num_workers=num_workers, **options)
        return out[..., :H].astype(q.dtype)

    prefills = (num_new > 1) & (lens > 0)
    last_rows = jnp.maximum(cu[1:] - 1, 0)
    decoded = gpu_decode.decode(rows[last_rows], pool, block_tables, lens, decodes, num_workers=num_workers, **options)
    prefilled = gpu_prefill.prefill(rows, pool, block_tables, jnp.where(prefills, lens, 0), cu, **options)
    token = jnp.arange(T, dtype=jnp.int32)
    seq = jnp.sum(cu[None, 1:] <= token[:, None], axis=1)  # S for rows of padding
    at = jnp.minimum(seq, S - 1)
    is_real = seq < S
    out = jnp.where((is_real & prefills[at])[:, None, None], prefilled, 0)
    out = jnp.where((is_real & decodes[at])[:, None, None], decoded[at], out)
    return out[..., :H].astype(q.dtype)
