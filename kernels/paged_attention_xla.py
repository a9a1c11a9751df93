"""Paged attention in plain JAX: runs everywhere, and is the CPU's production path."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels import kv_cache

write = kv_cache.write

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: (-inf) - (-inf) would be NaN
_NO_MAXIMUM = (
    0.5 * _MASKED
)  # a masked score is far below it, so its weight is 0 even where nothing is visible
_QUERY_TILE = 64
_CHUNK_TOKENS = 128


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "logits_soft_cap", "decode_only"))
def attend(
    q: Float[Array, "T N H"],
    pool: Float[Array, "B K P two_H"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    cu_seqlens_q: Int32[Array, " S+1"],
    num_seqs: Int32[Array, " 1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    decode_only: bool = False,
) -> Float[Array, "T N H"]:
    """See `paged_attention.attend`."""
    T, N, H = q.shape
    B, K, P, _ = pool.shape
    M = block_tables.shape[1]
    G = N // K
    tile = 1 if decode_only else min(_QUERY_TILE, T)
    C = min(max(1, _CHUNK_TOKENS // P), M)
    precision = lax.Precision.HIGHEST if pool.dtype == jnp.float32 else None
    tables = jnp.pad(jnp.clip(block_tables, 0, B - 1), ((0, 0), (0, C)))
    q_padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    tiles_before = jnp.cumsum(-(-jnp.diff(cu_seqlens_q) // tile))

    def attend_tile(i, out):
        s = jnp.searchsorted(tiles_before, i, side="right")
        begin, end = cu_seqlens_q[s], cu_seqlens_q[s + 1]
        n = end - begin
        first = begin + (i - (tiles_before[s] - -(-n // tile))) * tile
        rows = first + jnp.arange(tile)
        q_pos = context_lens[s] - n + rows - begin  # [tile]
        qt = lax.dynamic_slice(q_padded, (first, 0, 0), (tile, N, H)).astype(pool.dtype)
        qt = qt.reshape(tile, K, G, H).transpose(1, 2, 0, 3).reshape(K, G * tile, H)
        last = jnp.minimum(q_pos[0] + tile, context_lens[s])  # one past the last visible position
        low = jnp.int32(0) if sliding_window is None else jnp.maximum(q_pos[0] - sliding_window + 1, 0)

        def attend_chunk(j, state):
            m, total, acc = state
            ids = lax.dynamic_slice(tables, (s, j * C), (1, C))[0]
            kv = pool[ids].transpose(1, 0, 2, 3).reshape(K, C * P, 2 * H)
            pos = j * (C * P) + jnp.arange(C * P)
            scores = jnp.einsum(
                "kgh,kth->kgt", qt, kv[..., :H], precision=precision, preferred_element_type=jnp.float32
            )
            scores *= scale
            if logits_soft_cap is not None:
                scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
            visible = (pos <= q_pos[:, None]) & (rows < end)[:, None] & (pos < last)
            if sliding_window is not None:
                visible &= pos > q_pos[:, None] - sliding_window
            scores = jnp.where(jnp.tile(visible, (G, 1)), scores, _MASKED)
            m_new = jnp.maximum(m, scores.max(-1, keepdims=True))
            p = jnp.exp(scores - m_new)
            shrink = jnp.exp(m - m_new)
            v = jnp.where(((pos >= low) & (pos < last))[:, None], kv[..., H:], 0)
            acc = acc * shrink + jnp.einsum(
                "kgt,kth->kgh",
                p.astype(pool.dtype),
                v,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return m_new, total * shrink + p.sum(-1, keepdims=True), acc

        shape = (K, G * tile, 1)
        state = (jnp.full(shape, _NO_MAXIMUM), jnp.zeros(shape), jnp.zeros((K, G * tile, H)))
        _, total, acc = lax.fori_loop(low // (C * P), -(-last // (C * P)), attend_chunk, state)
        o = (
            (acc / jnp.where(total > 0, total, 1))
            .reshape(K, G, tile, H)
            .transpose(2, 0, 1, 3)
            .reshape(tile, N, H)
        )
        return lax.dynamic_update_slice(out, o.astype(out.dtype), (first, 0, 0))

    num_tiles = jnp.where(num_seqs[0] > 0, tiles_before[num_seqs[0] - 1], 0)
    return lax.fori_loop(0, num_tiles, attend_tile, jnp.zeros_like(q_padded))[:T]
