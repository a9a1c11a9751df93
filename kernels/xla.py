"""Paged attention in plain JAX: runs everywhere, and is the CPU's production path.

Both forms walk over chunks of cached blocks with an online softmax: a loop whose temporaries stay small, and whose
number of steps follows what is cached and not what the shapes would hold. Keys and values are gathered by (block,
head), each half by itself, so that a batched product takes them without a copy or a transpose.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxvllm.kernels import kv_cache

write = kv_cache.write

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: (-inf) - (-inf) would be NaN
_NO_MAXIMUM = 0.5 * _MASKED  # a masked score is far below it, so its weight is 0 even where nothing is visible
_DECODE_ROWS = 16  # most sequences in a step of a decode: a step costs some ten small calls, whatever it holds
_DECODE_TOKENS = 1024  # of all its sequences together, where the bounds of a chunk leave the choice
_DECODE_CHUNK_TOKENS = (96, 256)  # least and most: short chunks are many steps, long ones waste the last one's end
_DECODE_BYTES = 16 << 20  # most keys and values in a step: temporaries above 32 MiB are mapped anew at every call
_QUERY_TILE = 64  # new tokens that share the keys they read: 128 gain a tenth on one long prompt, short ones lose
_CHUNK_TOKENS = 128  # keys in a step of a query tile


class _Options(NamedTuple):
    """What shapes a score, beside q and k: static."""

    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


class _Softmax(NamedTuple):
    """An unfinished softmax, float32: greatest score and sum of weights [R K G 1], weighted values [R K G H]."""

    maximum: Array
    total: Array
    weighted: Array


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
    """See `paged_attention.attend`. Jitted, so that the layers of a model trace and lower it once."""
    options = _Options(scale, sliding_window, logits_soft_cap)
    live = jnp.arange(block_tables.shape[0]) < num_seqs[0]
    context_lens = jnp.where(live, context_lens, 0)
    if decode_only:
        return _decode(q, pool, block_tables, context_lens, options)
    num_new = jnp.where(live, cu_seqlens_q[1:] - cu_seqlens_q[:-1], 0)
    return _ragged(q, pool, block_tables, context_lens, cu_seqlens_q[:-1], num_new, options)


def _decode(
    q: Float[Array, "S N H"],
    pool: Float[Array, "B K P two_H"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    options: _Options,
) -> Float[Array, "S N H"]:
    """One new token per sequence: a flat loop over (chunk, tile of R sequences), the longest sequences first.

    Sorted by their number of chunks, the sequences that still have a chunk j are the first ones: each step takes the
    next R of them, and a sequence costs what its own context costs. Carries the softmax of all S sequences.
    """
    S, N, H = q.shape
    _, K, P, _ = pool.shape
    R, C = _decode_tile(S, pool)
    num_rows = -(-S // R) * R

    context_lens = jnp.pad(context_lens, (0, num_rows - S))
    first_block = lax.div(_lowest_visible(context_lens - 1, options), P)
    num_chunks = lax.div(context_lens - first_block * P + (C * P - 1), C * P)
    order = jnp.argsort(-num_chunks) if num_rows > R else jnp.arange(num_rows)
    first_block, num_chunks, context_lens, block_tables, queries = (
        x.at[order].get(mode="clip") for x in (first_block, num_chunks, context_lens, block_tables, q)
    )
    queries = queries.reshape(num_rows, K, N // K, H).astype(pool.dtype)

    def step(carry):
        j, row, softmax = carry

        def rows_of(x):
            return lax.dynamic_slice_in_dim(x, row, R)

        block = (rows_of(first_block) + j * C)[:, None] + jnp.arange(C)
        ids = block_tables.at[row + jnp.arange(R)[:, None], block].get(mode="clip")
        position = (block[..., None] * P + jnp.arange(P)).reshape(R, C * P)
        last = rows_of(context_lens)[:, None] - 1
        visible = (position <= last) & (position >= _lowest_visible(last, options))
        part = _Softmax(*map(rows_of, softmax))
        part = _attend_chunk(rows_of(queries), pool, ids, visible[:, None], visible, part, options)
        softmax = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, row, 0), softmax, part)

        row += R
        chunk_is_done = row >= jnp.sum(num_chunks > j)
        return jnp.where(chunk_is_done, j + 1, j), jnp.where(chunk_is_done, 0, row), softmax

    # the first chunk shrinks whatever stands here to nothing; zeros would be made for all layers of a step at once
    softmax = _empty_softmax(queries)._replace(weighted=queries.astype(jnp.float32))
    longest = jnp.max(num_chunks)
    carry = (jnp.int32(0), jnp.int32(0), softmax)
    softmax = lax.while_loop(lambda carry: carry[0] < longest, step, carry)[2]
    place = jnp.zeros_like(order).at[order].set(jnp.arange(num_rows))[:S]
    return _finish(_Softmax(*(x[place] for x in softmax))).astype(q.dtype).reshape(S, N, H)


def _decode_tile(S: int, pool: Array) -> tuple[int, int]:
    """Returns the sequences and the blocks of one step: first rows, then longer chunks where rows are few."""
    _, K, P, two_hp = pool.shape
    least, most = (max(1, tokens // P) for tokens in _DECODE_CHUNK_TOKENS)
    block_bytes = K * P * two_hp * pool.dtype.itemsize
    most_rows = max(1, min(_DECODE_ROWS, _DECODE_BYTES // (least * block_bytes)))
    rows = -(-S // -(-S // most_rows))  # the fewest tiles, of even size
    return rows, max(least, min(most, _DECODE_TOKENS // (rows * P), _DECODE_BYTES // (rows * block_bytes)))


def _ragged(
    q: Float[Array, "T N H"],
    pool: Float[Array, "B K P two_H"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    first_row: Int32[Array, " S"],
    num_new: Int32[Array, " S"],
    options: _Options,
) -> Float[Array, "T N H"]:
    """Any mixture: a loop over tiles of new tokens, and over chunks of all the blocks that the tile's tokens see.

    A tile is a run of rows, whatever sequences they belong to: its blocks are those of its sequences one after the
    other, and a row sees the keys of its own. So many short prompts share a tile, and no tile is mostly padding.
    """
    T, N, H = q.shape
    _, K, P, _ = pool.shape
    G = N // K
    tile = min(_QUERY_TILE, T)
    C = max(1, _CHUNK_TOKENS // P)
    padding = -T % tile
    plan = _plan_tiles((T + padding) // tile, tile, P, context_lens, first_row, num_new, options)

    def attend_tile(i, out):
        def rows_of(x):
            return lax.dynamic_slice_in_dim(x, i * tile, tile)

        seq, position = rows_of(plan.row_seq)[:, None], rows_of(plan.row_position)[:, None]
        queries = rows_of(out).reshape(tile, K, G, H).transpose(1, 2, 0, 3).reshape(1, K, G * tile, H)
        queries = queries.astype(pool.dtype)

        def step(j, softmax):
            entry = j * C + jnp.arange(C)
            key_seq = jnp.sum(entry[:, None] >= plan.end_block[i], axis=1)  # S past the tile's last block
            block = entry + plan.block_shift.at[i, key_seq].get(mode="clip")
            ids = block_tables.at[key_seq, block].get(mode="clip")
            key_position = (block[:, None] * P + jnp.arange(P)).reshape(C * P)
            visible = (jnp.repeat(key_seq, P) == seq) & (key_position <= position)
            visible &= key_position >= _lowest_visible(position, options)
            live = visible.any(axis=0)
            return _attend_chunk(
                queries, pool, ids[None], jnp.tile(visible, (G, 1))[None], live[None], softmax, options
            )

        num_chunks = lax.div(plan.end_block[i, -1] + (C - 1), C)
        softmax = lax.fori_loop(0, num_chunks, step, _empty_softmax(queries))
        answer = _finish(softmax).astype(q.dtype).reshape(K, G, tile, H).transpose(2, 0, 1, 3)
        return lax.dynamic_update_slice_in_dim(out, answer.reshape(tile, N, H), i * tile, 0)

    # each tile's answer takes the place of its queries: a buffer of zeros to fill would be made for all layers at once
    out = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    out = jnp.where(plan.row_position[:, None, None] >= 0, out, 0)
    return lax.fori_loop(0, plan.num_live_tiles, attend_tile, out)[:T]


class _TilePlan(NamedTuple):
    """Which sequence and position each row has, and which blocks each tile reads: the same for all layers of a step.

    The blocks of tile i are numbered through its sequences: number e belongs to the first sequence s with
    `end_block[i, s] > e`, and is entry `e + block_shift[i, s]` of its block table.
    """

    row_seq: Int32[Array, " rows"]
    row_position: Int32[Array, " rows"]  # padding: -1, which sees nothing
    end_block: Int32[Array, "tiles S"]
    block_shift: Int32[Array, "tiles S"]
    num_live_tiles: Int32[Array, ""]


def _plan_tiles(
    num_tiles: int,
    tile: int,
    P: int,
    context_lens: Int32[Array, " S"],
    first_row: Int32[Array, " S"],
    num_new: Int32[Array, " S"],
    options: _Options,
) -> _TilePlan:
    """Plans tiles of `tile` rows: a sequence's part in a tile reads from its first row's lowest key to its last row."""
    row = jnp.arange(num_tiles * tile)
    end_row = first_row + num_new
    position_shift = context_lens - end_row
    row_seq = jnp.minimum(jnp.sum(row[:, None] >= end_row, axis=1), end_row.shape[0] - 1)
    is_new = (row >= first_row[row_seq]) & (row < end_row[row_seq])

    tile_start = jnp.arange(num_tiles)[:, None] * tile
    begin, end = jnp.maximum(first_row, tile_start), jnp.minimum(end_row, tile_start + tile)
    first_block = lax.div(_lowest_visible(begin + position_shift, options), P)
    num_blocks = jnp.where(begin < end, lax.div(end + position_shift + (P - 1), P) - first_block, 0)
    end_block = jnp.cumsum(num_blocks, axis=1)
    return _TilePlan(
        row_seq=row_seq,
        row_position=jnp.where(is_new, row + position_shift[row_seq], -1),
        end_block=end_block,
        block_shift=first_block - (end_block - num_blocks),
        num_live_tiles=lax.div(jnp.max(end_row) + (tile - 1), tile),
    )


def _attend_chunk(
    q: Float[Array, "R K G H"],
    pool: Float[Array, "B K P two_H"],
    ids: Int32[Array, "R C"],
    visible: Bool[Array, "R #G C*P"],
    live: Bool[Array, "R C*P"],
    softmax: _Softmax,
    options: _Options,
) -> _Softmax:
    """Takes the keys and values of C blocks a row into the softmax of R rows, each of G queries per KV head.

    A value that no query sees (not `live`) is cleared: a NaN times a zero weight would still be NaN.
    """
    H = q.shape[-1]
    precision = lax.Precision.HIGHEST if pool.dtype == jnp.float32 else None
    k, v = _gather(pool, ids, 0), _gather(pool, ids, H)
    scores = jnp.einsum("rkgh,rkth->rkgt", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores *= options.scale
    if options.logits_soft_cap is not None:
        scores = options.logits_soft_cap * jnp.tanh(scores / options.logits_soft_cap)
    scores = jnp.where(visible[:, None], scores, _MASKED)
    v = jnp.where(live[:, None, :, None], v, 0)

    maximum = jnp.maximum(softmax.maximum, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - maximum)
    shrink = jnp.exp(softmax.maximum - maximum)
    weighted = jnp.einsum(
        "rkgt,rkth->rkgh", weights.astype(pool.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return _Softmax(
        maximum,
        softmax.total * shrink + jnp.sum(weights, axis=-1, keepdims=True),
        softmax.weighted * shrink + weighted,
    )


def _gather(pool: Float[Array, "B K P two_H"], ids: Int32[Array, "R C"], lane: int) -> Float[Array, "R K C*P H"]:
    """Returns H numbers from `lane` on of every token of the blocks: keys from 0, values from H. Clips the ids."""
    (R, C), (_, K, P, two_h) = ids.shape, pool.shape
    H = two_h // 2
    shape = (R, K, C)
    starts = (ids[:, None, :], jnp.arange(K)[None, :, None], jnp.int32(lane))
    blocks = lax.gather(
        pool,
        jnp.stack([jnp.broadcast_to(x, shape) for x in starts], axis=-1),
        lax.GatherDimensionNumbers(offset_dims=(3, 4), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 3)),
        slice_sizes=(1, 1, P, H),
        mode="clip",
    )
    return blocks.reshape(R, K, C * P, H)


def _lowest_visible(position: Int32[Array, "..."], options: _Options) -> Int32[Array, "..."]:
    """Returns the first position that a query at `position` sees."""
    if options.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (options.sliding_window - 1), 0)


def _empty_softmax(q: Float[Array, "R K G H"]) -> _Softmax:
    """Returns the softmax of no keys yet; made from q, so that under shard_map it varies over the mesh as q does."""
    weighted = jnp.zeros_like(q, jnp.float32)
    return _Softmax(jnp.full_like(weighted[..., :1], _NO_MAXIMUM), weighted[..., :1], weighted)


def _finish(softmax: _Softmax) -> Float[Array, "R K G H"]:
    """Returns the weighted mean, 0 where nothing was visible."""
    return jnp.where(softmax.total > 0, softmax.weighted / softmax.total, 0)
