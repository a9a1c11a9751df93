"""Ragged prefill attention for Hopper: many new tokens per sequence, over a cached prefix or none.

One thread block takes a tile of consecutive tokens of the batch and the G query heads of one KV head, 128
rows in all, and walks through the sequences that own tokens of the tile, each up to the last position its
tokens see. Two warpgroups compute 64 rows each; a third keeps the ring of K and V tiles full. Rows of other
sequences are masked, so no row is gathered, padded or scattered: q and the output stay [T, N * H].
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels import gpu_common as gpu
from jaxvllm.kernels.gpu_common import MASKED, NO_MAXIMUM, WGMMA

ROWS = 64  # of one compute warpgroup: wgmma's M
_COMPUTE_GROUPS = 2
_PRODUCER = _COMPUTE_GROUPS  # the index of the warpgroup that copies
_COMPUTE_REGISTERS, _PRODUCER_REGISTERS = 240, 24  # per thread: all in all, the register file


class PrefillConfig(NamedTuple):
    """The static side of a prefill launch."""

    group: int  # G
    block_size: int  # P
    tile: int  # K and V tokens per ring slot
    slots: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    interpreted: bool

    @property
    def rows(self) -> int:
        """Tokens per copy of K and V: a block, or a tile's worth of it."""
        return min(self.block_size, self.tile)

    @property
    def copies(self) -> int:
        """Copies of K and V per tile."""
        return self.tile // self.rows

    @property
    def box(self) -> int:
        """Rows per copy of q and of the output: tokens of one head. A power of two from 8 to 64."""
        return query_tokens(self.group) if self.group > 1 else ROWS

    @property
    def boxes(self) -> int:
        """Copies of q per compute warpgroup."""
        return ROWS // self.box


def query_tokens(group: int) -> int:
    """Returns the tokens per query tile: the most, a power of two, whose heads fit the rows."""
    fitting = _COMPUTE_GROUPS * ROWS // group
    return 1 << (fitting.bit_length() - 1)


class Segment(NamedTuple):
    """The part of a query tile that one sequence owns, and the K and V it looks at. All scalars."""

    seq: jax.Array
    begin: jax.Array  # tokens of the batch, within the tile
    end: jax.Array
    shift: jax.Array  # position in the sequence = token of the batch + shift
    context: jax.Array
    low: jax.Array  # first position seen by any of its tokens
    first: jax.Array  # tiles of K and V: first to last
    last: jax.Array


def _segment(seq, token, cu_ref, lens_ref, config: PrefillConfig) -> Segment:
    """Returns what the query tile that begins at `token` has of sequence `seq`."""
    context, after = lens_ref[seq], cu_ref[seq + 1]
    begin = lax.max(cu_ref[seq], token)
    end = lax.min(after, token + query_tokens(config.group))
    shift = context - after
    low = jnp.int32(0)
    if config.sliding_window is not None:
        low = lax.max(begin + shift - (config.sliding_window - 1), 0)
    first = lax.div(low, config.tile)
    last = lax.div(end + shift + (config.tile - 1), config.tile)
    last = lax.select((context > 0) & (begin < end), last, first)  # not for this kernel: no tiles
    return Segment(seq, begin, end, shift, context, low, first, last)


def _prefill_kernel(
    q_ref,
    pool_ref,
    tables_ref,
    lens_ref,
    cu_ref,
    first_ref,
    last_ref,
    o_ref,
    kv_smem,
    q_smem,
    p_smem,
    columns_smem,
    loaded,
    consumed,
    q_loaded,
    cleared,
    *,
    config: PrefillConfig,
):
    """One query tile of one KV head; grid (tiles, K), three warpgroups.

    GMEM: q and out o [T, N*H], pool [B, K, P, 2H], tables [S, M], lens [S] (0: not for this kernel), cu [S+1],
    first and last [tiles], the sequences that own tokens of a tile. SMEM: kv [slots, tile, 2H] the ring,
    q [2, 64, H], later the output, p [2, 64, tile], columns [2, tile], 0 to tile - 1 once per warpgroup. Barriers:
    loaded and consumed [slots], q_loaded [2], cleared.
    """
    head, group_id = lax.axis_index("head"), lax.axis_index("warpgroup")
    tile_id = first_ref.shape[0] - 1 - lax.axis_index("tile")  # the longest first: the chip empties evenly
    token = tile_id * query_tokens(config.group)
    sequences = first_ref[tile_id], last_ref[tile_id]

    @pl.when(group_id == _PRODUCER)
    def _produce():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def produce_segment(seq, index):
            segment = _segment(seq, token, cu_ref, lens_ref, config)

            def produce_tile(t, index):
                slot = lax.rem(index, config.slots)
                pl.when(index >= config.slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                for j in range(config.copies):  # one after the other: 24 registers hold no more
                    block, row = _block_of_piece(t * config.copies + j, segment, pool_ref, tables_ref, config)
                    plgpu.copy_gmem_to_smem(
                        pool_ref.at[block, head, pl.ds(row, config.rows)],
                        kv_smem.at[slot, pl.ds(j * config.rows, config.rows)],
                        loaded.at[slot],
                    )
                return index + 1

            return lax.fori_loop(segment.first, segment.last, produce_tile, index)

        lax.fori_loop(*sequences, produce_segment, jnp.int32(0))

    @pl.when(group_id < _COMPUTE_GROUPS)
    def _compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        q_rows, p_rows, columns = q_smem.at[group_id], p_smem.at[group_id], columns_smem.at[group_id]
        columns[...] = plgpu.broadcasted_iota(jnp.int32, columns.shape, 0, layout=WGMMA.reduce(0))
        boxes = _boxes(head, group_id, token, config, q_smem.shape[2])
        for b, (source, _rows) in enumerate(boxes):
            plgpu.copy_gmem_to_smem(
                q_ref.at[source], q_rows.at[pl.ds(b * config.box, config.box)], q_loaded.at[group_id]
            )
        plgpu.barrier_wait(q_loaded.at[group_id])
        first_token = token + (group_id * ROWS if config.group == 1 else 0)

        def attend_segment(seq, carry):
            segment = _segment(seq, token, cu_ref, lens_ref, config)

            def attend_tile(t, carry):
                index, state = carry
                slot = lax.rem(index, config.slots)
                plgpu.barrier_wait(loaded.at[slot])
                state = _attend_tile(
                    state, kv_smem.at[slot], q_rows, p_rows, columns, cleared, t, first_token, segment, config
                )
                plgpu.barrier_arrive(consumed.at[slot])
                return index + 1, state

            return lax.fori_loop(segment.first, segment.last, attend_tile, carry)

        row = WGMMA.reduce(1)
        state = (
            gpu.full((ROWS, q_smem.shape[2]), 0.0, WGMMA),
            gpu.full((ROWS,), NO_MAXIMUM, row),
            gpu.full((ROWS,), 0.0, row),
        )
        _, (acc, _, total) = lax.fori_loop(*sequences, attend_segment, (jnp.int32(0), state))
        total = jnp.where(total > 0, total, 1.0)
        q_rows[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(q_smem.dtype)
        plgpu.commit_smem()
        for b, (target, exists) in enumerate(boxes):

            @pl.when(exists)
            def _(b=b, target=target):
                plgpu.copy_smem_to_gmem(q_rows.at[pl.ds(b * config.box, config.box)], o_ref.at[target])

        plgpu.wait_smem_to_gmem(0)


def _boxes(head, group_id, token, config: PrefillConfig, head_dim: int):
    """Returns where the boxes of a warpgroup's rows lie in q: [((tokens, columns), it exists)].

    With one head per KV head the two warpgroups share its tokens; else each has heads of its own. A box without
    a head repeats the last head's.
    """
    if config.group == 1:
        columns = pl.ds(head * head_dim, head_dim)
        return [((pl.ds(token + group_id * ROWS, ROWS), columns), group_id >= 0)]
    found = []
    for b in range(config.boxes):
        g = group_id * config.boxes + b
        q_head = head * config.group + lax.min(g, config.group - 1)
        found.append(((pl.ds(token, config.box), pl.ds(q_head * head_dim, head_dim)), g < config.group))
    return found


def _block_of_piece(piece, segment: Segment, pool_ref, tables_ref, config: PrefillConfig):
    """Returns where the copy of a piece of K and V comes from: (block, first row in it).

    As in `gpu_decode`: what nothing needs is replaced by the nearest piece that something does.
    """
    rows, per_block = config.rows, config.block_size // config.rows
    lowest = lax.div(segment.low, rows)
    highest = lax.div(segment.end + segment.shift + (rows - 1), rows) - 1
    wanted = lax.min(lax.max(piece, lowest), highest)
    block = tables_ref[segment.seq, lax.div(wanted, per_block)]
    block = lax.max(lax.min(block, pool_ref.shape[0] - 1), 0)  # a wrong id must not read outside the pool
    return block, lax.rem(wanted, per_block) * rows


def _attend_tile(
    state,
    kv_smem,
    q_smem,
    p_smem,
    columns_smem,
    cleared,
    t,
    first_token,
    segment: Segment,
    config: PrefillConfig,
):
    """Folds K and V tile t into (acc [64, H], m [64], total [64]) of one warpgroup; m in base 2 and scaled."""
    acc, m, total = state
    tile, head_dim = config.tile, q_smem.shape[1]
    k_smem, v_smem = kv_smem.at[:, pl.ds(0, head_dim)], kv_smem.at[:, pl.ds(head_dim, head_dim)]

    base = t * tile
    pl.when((base + tile > segment.context) | (base < segment.low))(
        lambda: _clear_values(v_smem, cleared, segment.low - base, segment.context - base)
    )
    s = gpu.product(q_smem, gpu.transposed(k_smem))
    s, factor = gpu.scores_in_base_2(s, config.scale, config.logits_soft_cap)
    s = lax.cond(
        _all_visible(base, first_token, segment, config),
        lambda s: s,
        lambda s: _mask_scores(s, base, first_token, columns_smem, segment, config),
        s,
    )
    m_new = jnp.maximum(m, s.max(axis=1) * factor)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
    total = total * alpha + p.sum(axis=1)
    p_smem[...] = p.astype(p_smem.dtype)
    plgpu.commit_smem()

    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
    return gpu.add_product(acc, p_smem, v_smem, interpreted=config.interpreted), m_new, total


def _all_visible(base, first_token, segment: Segment, config: PrefillConfig):
    """Whether every row of the warpgroup sees every token of the tile at `base`."""
    last_token = first_token + config.box - 1
    visible = (segment.begin <= first_token) & (last_token < segment.end)
    visible &= base + config.tile - 1 <= first_token + segment.shift
    if config.sliding_window is not None:
        visible &= base > last_token + segment.shift - config.sliding_window
    return visible


def _mask_scores(s, base, first_token, columns_smem, segment: Segment, config: PrefillConfig):
    """Clears the scores that a row must not see; for a row of another sequence, all.

    The columns' numbers come from shared memory: computed, they would be hoisted out of the loop and spill.
    """
    row = plgpu.broadcasted_iota(jnp.int32, s.shape[:1], 0, layout=WGMMA.reduce(1))
    token = (row & (config.box - 1)) + first_token
    # a row sees the columns up to `last` of the tile; a row of another sequence, none
    is_own = (token >= segment.begin) & (token < segment.end)
    last = jnp.where(is_own, token + (segment.shift - base), jnp.full_like(token, -1))
    column = plgpu.load(columns_smem, layout=WGMMA.reduce(0), optimized=False)
    behind = lax.broadcast_in_dim(last, s.shape, [0]) - lax.broadcast_in_dim(column, s.shape, [1])
    if config.sliding_window is None:
        return jnp.where(behind >= 0, s, MASKED)
    # both bounds in one comparison: a column ahead is far behind as an unsigned number
    return jnp.where(behind.astype(jnp.uint32) < config.sliding_window, s, MASKED)


def _clear_values(v_smem, cleared, first, last):
    """Clears V outside the tile's tokens [first, last): 0 * NaN is NaN. The warpgroups share the columns."""
    tile, head_dim = v_smem.shape
    group_id = lax.axis_index("warpgroup")
    for c in range(head_dim // 64):

        @pl.when(group_id == c % _COMPUTE_GROUPS)
        def _(c=c):
            v_piece = v_smem.at[:, pl.ds(c * 64, 64)]
            token = plgpu.broadcasted_iota(jnp.int32, (tile, 64), 0, layout=WGMMA)
            v = plgpu.layout_cast(v_piece[...], WGMMA)
            v_piece[...] = jnp.where((token >= first) & (token < last), v, jnp.zeros_like(v))

    plgpu.commit_smem()
    plgpu.barrier_arrive(cleared)  # both have cleared their columns before either reads V
    plgpu.barrier_wait(cleared)


def prefill(
    q: Float[Array, "T N H"],
    pool: Float[Array, "B K P two_H"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    cu_seqlens_q: Int32[Array, " S+1"],
    *,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    tile: int | None = None,
    interpret: Any = False,
) -> Float[Array, "T N H"]:
    """Attends the tokens of the sequences whose `context_lens` is above 0; the other rows hold nonsense.

    q, in the pool's dtype, has the pool's padded head size.
    """
    T, N, H = q.shape
    _, K, P, _ = pool.shape
    group = N // K
    if tile is None:
        tile = 64 if H > 128 else 128
    slots = 3 if H == 64 else 2
    tokens = query_tokens(group)
    num_tiles = pl.cdiv(T, tokens)
    config = PrefillConfig(group, P, tile, slots, float(scale), sliding_window, logits_soft_cap, bool(interpret))
    begins = jnp.arange(num_tiles, dtype=jnp.int32)[:, None] * tokens
    first = jnp.sum(cu_seqlens_q[None, 1:] <= begins, axis=1, dtype=jnp.int32)
    ends = jnp.minimum(begins + tokens, cu_seqlens_q[-1])
    last = jnp.sum(cu_seqlens_q[None, :-1] < ends, axis=1, dtype=jnp.int32)
    padded = num_tiles * tokens
    out = plgpu.kernel(
        functools.partial(_prefill_kernel, config=config),
        out_type=jax.ShapeDtypeStruct((padded, N * H), q.dtype),
        scratch_types=(
            plgpu.SMEM((slots, tile, 2 * H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((_COMPUTE_GROUPS, ROWS, H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((_COMPUTE_GROUPS, ROWS, tile), pool.dtype, transforms=gpu.mma_transforms(tile)),
            plgpu.SMEM((_COMPUTE_GROUPS, tile), jnp.int32),
            plgpu.Barrier(num_arrivals=config.copies, num_barriers=slots),
            plgpu.Barrier(num_arrivals=_COMPUTE_GROUPS, num_barriers=slots),
            plgpu.Barrier(num_arrivals=config.boxes, num_barriers=_COMPUTE_GROUPS),
            plgpu.Barrier(num_arrivals=_COMPUTE_GROUPS),
        ),
        grid=(num_tiles, K),
        grid_names=("tile", "head"),
        num_threads=_COMPUTE_GROUPS + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(
        jnp.pad(q.reshape(T, N * H), ((0, padded - T), (0, 0))),
        pool,
        block_tables,
        context_lens,
        cu_seqlens_q,
        first,
        last,
    )
    return out[:T].reshape(T, N, H)
