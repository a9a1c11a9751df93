"""Paged attention on the TPU: fits a batch to the kernels, and chooses one of them from static facts.

`tpu_decode` serves steps of one new token per sequence and writes those too, `tpu_ragged` everything else (prefill,
chunks over a cached prefix, mixtures), before which `tpu_cache_write` puts new keys and values into their blocks.
The kernels know nothing of the devices there are: `chip` is the kind to choose tiles for, None is tiles that fit all.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels.paged_attention import AttentionForm
from jaxvllm.kernels.tpu import tiles as tpu_tiles
from jaxvllm.kernels.tpu.cache_write import join_rows, write
from jaxvllm.kernels.tpu.decode import attend_decode
from jaxvllm.kernels.tpu.ragged import attend_ragged

__all__ = ["attend", "chip_of", "shape_of", "why_unsupported", "write", "write_and_attend_decode"]


def why_unsupported(form: AttentionForm) -> str | None:
    """Returns why the kernels cannot take a model on a TPU, in a sentence, or None."""
    return tpu_tiles.why_unsupported(form.num_heads, form.num_kv_heads, form.head_dim, form.block_size, form.dtype)


def chip_of(device_kind: str) -> str | None:
    """Returns the chip whose tiles suit a device of JAX's name, or None: then tiles that fit every chip are used."""
    return tpu_tiles.CHIP_OF_KIND.get(device_kind)


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
    chip: str | None = None,
) -> Float[Array, "T N H"]:
    """See `paged_attention.attend`. Raises ValueError for what the kernels are not made for."""
    shape = shape_of(q, pool, block_tables)
    padded = _pad_heads(q, pool, shape)
    live_lens = _live(context_lens, num_seqs)
    options = {"scale": scale, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
    if decode_only:
        out, _ = _decode(padded, None, pool, block_tables, live_lens, tpu_tiles.decode_tiles(shape, chip), options)
    else:
        tiles = tpu_tiles.ragged_tiles(shape, chip)
        out = _ragged(padded, pool, block_tables, live_lens, cu_seqlens_q, num_seqs, tiles, options)
    return _unpad_heads(out, q, pool, shape)


def write_and_attend_decode(
    q: Float[Array, "S N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    pool: Float[Array, "B K P two_Hp"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    num_seqs: Int32[Array, " 1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    chip: str | None = None,
) -> tuple[Float[Array, "S N H"], Float[Array, "B K P two_Hp"]]:
    """See `paged_attention.write_and_attend`: its decode, in one kernel. A token's slot follows from its table."""
    shape = shape_of(q, pool, block_tables)
    tiles = tpu_tiles.decode_tiles(shape, chip)
    options = {"scale": scale, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
    new, live_lens = join_rows(k, v, pool), _live(context_lens, num_seqs)
    out, pool = _decode(_pad_heads(q, pool, shape), new, pool, block_tables, live_lens, tiles, options)
    return _unpad_heads(out, q, pool, shape), pool


def shape_of(q, pool, block_tables) -> tpu_tiles.Shape:
    """What a call is specialised for, of q [T, N, H], pool [B, K, P, 2Hp] and block_tables [S, M], or their shapes.

    Raises ValueError for what the kernels are not made for.
    """
    T, N, H = q.shape
    _, K, P, two_hp = pool.shape
    S, M = block_tables.shape
    reason = tpu_tiles.why_unsupported(N, K, H, P, pool.dtype)
    if reason is not None:
        raise ValueError(reason)
    return tpu_tiles.Shape(
        num_tokens=T,
        num_seqs=S,
        num_kv_heads=K,
        group=tpu_tiles.padded_group(N // K, K, pool.dtype),
        lanes=max(two_hp // 2, tpu_tiles.LANES),
        row_width=two_hp,
        block_size=P,
        blocks_per_seq=M,
        itemsize=pool.dtype.itemsize,
    )


def _live(context_lens: Int32[Array, " S"], num_seqs: Int32[Array, " 1"]) -> Int32[Array, " S"]:
    return jnp.where(jnp.arange(context_lens.shape[0]) < num_seqs, context_lens, 0)


def _pad_heads(q, pool, shape):
    """[T, N, H] to [T, K * group, lanes], in the pool's dtype: heads to a power of two per KV head, sizes to 128 lanes.

    `scale` stays that of the true size.
    """
    T, N, H = q.shape
    K = shape.num_kv_heads
    padded = q.reshape(T, K, N // K, H).astype(pool.dtype)
    padded = jnp.pad(padded, ((0, 0), (0, 0), (0, shape.group - N // K), (0, shape.lanes - H)))
    return padded.reshape(T, K * shape.group, shape.lanes)


def _unpad_heads(out, q, pool, shape):
    """[T, K * group, lanes] to the shape and dtype of q [T, N, H]."""
    T, N, H = q.shape
    K, two_hp = shape.num_kv_heads, pool.shape[3]
    out = out.reshape(T, K, shape.group, shape.lanes)[:, :, : N // K]
    low = two_hp // 2 if two_hp == shape.lanes else 0  # key and value share the lanes: the value's half is the answer
    return out[..., low : low + H].reshape(T, N, H).astype(q.dtype)


def _decode(q, new, pool, block_tables, lens, tiles, options):
    """Whole groups of sequences, as many in a call as SMEM holds the tables of and VMEM the queries.

    q [S, N, HL], new [S, K, 2Hp] or None. Returns the answers and the pool.
    """
    S = lens.shape[0]
    padding = tpu_tiles.round_to(S, tiles.seqs) - S
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    new = None if new is None else jnp.pad(new, ((0, padding), (0, 0), (0, 0)))
    block_tables, lens = jnp.pad(block_tables, ((0, padding), (0, 0))), jnp.pad(lens, (0, padding))
    parts = [
        slice(begin, min(begin + tiles.seqs_per_call, S + padding))
        for begin in range(0, S + padding, tiles.seqs_per_call)
    ]
    out = []
    for at in parts:
        part, pool = attend_decode(
            q[at], None if new is None else new[at], pool, block_tables[at], lens[at], tiles=tiles, **options
        )
        out.append(part)
    return (out[0] if len(out) == 1 else jnp.concatenate(out))[:S], pool


def _ragged(q, pool, block_tables, lens, cu_seqlens_q, num_seqs, tiles, options):
    """As many sequences in a call as SMEM holds the tables of; every call adds its rows to the same output."""
    out = jnp.zeros_like(q)
    S = lens.shape[0]
    for begin in range(0, S, tiles.seqs_per_call):
        end = min(begin + tiles.seqs_per_call, S)
        count = jnp.clip(num_seqs - begin, 0, end - begin)
        cu = cu_seqlens_q[begin : end + 1]
        out = attend_ragged(q, pool, out, block_tables[begin:end], lens[begin:end], cu, count, tiles=tiles, **options)
    return out
