"""The obvious float32 form of every op: the oracle that each backend is tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def write(
    pool: Float[Array, "B K P two_Hp"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
) -> Float[Array, "B K P two_Hp"]:
    """Writes token after token; a slot outside the pool leaves the pool as it is."""
    B, _, P, two_hp = pool.shape
    H = k.shape[2]

    def write_token(t, pool):
        slot = slot_mapping[t]
        block, offset = jnp.clip(slot // P, 0, B - 1), slot % P
        row = jnp.zeros((k.shape[1], two_hp), pool.dtype)
        row = row.at[:, :H].set(k[t].astype(pool.dtype))
        row = row.at[:, two_hp // 2 : two_hp // 2 + H].set(v[t].astype(pool.dtype))
        inside = (slot >= 0) & (slot < B * P)
        return pool.at[block, :, offset].set(jnp.where(inside, row, pool[block, :, offset]))

    return jax.lax.fori_loop(0, k.shape[0], write_token, pool)


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
) -> Float[Array, "T N H"]:
    """Attends sequence after sequence: all T tokens against its whole table, kept where token and key belong.

    Takes [N, T, M*P] floats at a time: for tests. `decode_only` promises a shape and changes nothing.
    """
    T, N, H = q.shape
    _, K, P, two_hp = pool.shape
    M = block_tables.shape[1]
    token, position = jnp.arange(T)[:, None], jnp.arange(M * P)[None, :]

    def attend_sequence(s, out):
        num_new = cu_seqlens_q[s + 1] - cu_seqlens_q[s]
        is_new = (token >= cu_seqlens_q[s]) & (token < cu_seqlens_q[s + 1])  # [T, 1]
        query_position = token - cu_seqlens_q[s] + context_lens[s] - num_new
        visible = is_new & (position < context_lens[s]) & (position <= query_position)  # [T, M*P]
        if sliding_window is not None:
            visible &= position > query_position - sliding_window

        rows = jnp.take(pool, block_tables[s], axis=0, mode="clip")  # ids past the context may be anything
        rows = rows.swapaxes(1, 2).reshape(M * P, K, two_hp).astype(jnp.float32)
        live = jnp.any(visible, axis=0)[:, None, None]  # a NaN times a zero weight would still be NaN
        k = jnp.where(live, rows[..., :H], 0).repeat(N // K, axis=1)
        v = jnp.where(live, rows[..., two_hp // 2 :][..., :H], 0).repeat(N // K, axis=1)

        scores = jnp.einsum("tnh,cnh->ntc", q.astype(jnp.float32), k, precision="highest") * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        weights = jnp.where(visible, weights, 0)  # a row that sees nothing is NaN until here
        answer = jnp.einsum("ntc,cnh->tnh", weights, v, precision="highest")
        return jnp.where(is_new[:, :, None], answer, out)

    out = jax.lax.fori_loop(0, num_seqs[0], attend_sequence, jnp.zeros((T, N, H), jnp.float32))
    return out.astype(q.dtype)
