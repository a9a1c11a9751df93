"""Decode attention for Hopper: one new token per sequence, the cache streamed through shared memory.

The kernel is bound by memory, so its plan is to keep the copies flowing. All tiles of all sequences, end
to end, form one line. It is cut into equal pieces, one per worker (a thread block per KV head), as many
workers as the chip holds at once: one huge context beside many small ones is cut like any other. A worker
walks through its piece, across sequences, always `slots` tiles of copies ahead. Each (worker, sequence)
leaves a part; a second, small kernel combines the parts of each sequence.

wgmma wants 64 rows, and a KV head has only G = N/K queries. So the tokens are the rows, and the queries
are C columns, G rounded up to a multiple of 8:

    scores   [tile, C]  = K [tile, H] . q^T [H, C]
    output^T [H, C]    += V^T [H, tile] . p [tile, C]

Both operands are read by the tensor core from shared memory; only p passes through registers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from jaxvllm.kernels import gpu_common as gpu
from jaxvllm.kernels.gpu_common import MASKED, NO_MAXIMUM, WGMMA

_SLOTS_BYTES = (98_304, 196_608)  # of the ring, so that two workers fit a multiprocessor, or else one
_SLOTS = (3, 4)  # at least, at most
_COMBINE_UNROLL = 4  # parts loaded together: their latencies overlap


class DecodePlan(NamedTuple):
    """The line of tiles and how it is cut. A "list index" counts the sequences that decode, in order."""

    seq_ids: Int32[Array, " S"]  # the sequence at each list index
    starts: Int32[Array, " S+1"]  # its first tile on the line; past the list: the line's length
    bounds: Int32[Array, " W+1"]  # the tiles of worker w: bounds[w] to bounds[w + 1]
    first: Int32[Array, " W"]  # the list indices of worker w: first[w] to last[w]
    last: Int32[Array, " W"]
    ranks: Int32[Array, " S"]  # the list index of each sequence; -1 where it does not decode


def make_plan(
    decodes: Bool[Array, " S"],
    context_lens: Int32[Array, " S"],
    *,
    tile: int,
    num_workers: int,
    sliding_window: int | None,
) -> DecodePlan:
    """Cuts the tiles of the sequences that decode into equal pieces, at most one tile apart.

    Compares all with all, S * max(S, W) numbers: on a GPU that is one small launch, a scan is many.
    """
    (S,) = context_lens.shape
    index = jnp.arange(S, dtype=jnp.int32)
    first_tile = _first_visible(context_lens, sliding_window) // tile
    tiles = jnp.where(decodes, -(-context_lens // tile) - first_tile, 0)
    before = index[None, :] < index[:, None]
    ranks = jnp.sum(before & decodes[None, :], axis=1, dtype=jnp.int32)
    at = (ranks[None, :] == index[:, None]) & decodes[None, :]  # [list index, sequence]
    seq_ids = jnp.sum(jnp.where(at, index[None, :], 0), axis=1, dtype=jnp.int32)
    listed = jnp.sum(jnp.where(at, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    upto = jnp.arange(S + 1)[:, None] > index[None, :]
    starts = jnp.sum(jnp.where(upto, listed[None, :], 0), axis=1, dtype=jnp.int32)

    total = starts[-1]
    per_worker = jnp.maximum(-(-total // num_workers), 1)
    bounds = jnp.minimum(jnp.arange(num_workers + 1, dtype=jnp.int32) * per_worker, total)
    first = jnp.sum(starts[None, 1:] <= bounds[:-1, None], axis=1, dtype=jnp.int32)
    last = jnp.sum(starts[None, :-1] < bounds[1:, None], axis=1, dtype=jnp.int32)
    return DecodePlan(seq_ids, starts, bounds, first, last, jnp.where(decodes, ranks, -1))


def _first_visible(context, sliding_window: int | None):
    """Returns the first position that the last token of `context` sees."""
    return 0 if sliding_window is None else jnp.maximum(context - sliding_window, 0)


class DecodeConfig(NamedTuple):
    """The static side of a decode launch."""

    group: int  # G
    block_size: int  # P
    tile: int  # tokens per ring slot
    slots: int
    num_workers: int  # W, per KV head
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None

    @property
    def rows(self) -> int:
        """Tokens per copy: a block, or a tile's worth of it."""
        return min(self.block_size, self.tile)

    @property
    def copies(self) -> int:
        """Copies per tile."""
        return self.tile // self.rows


def _decode_kernel(
    q_ref,
    pool_ref,
    tables_ref,
    lens_ref,
    seq_ids_ref,
    starts_ref,
    bounds_ref,
    first_ref,
    last_ref,
    parts_ref,
    lse_ref,
    kv_smem,
    q_smem,
    p_smem,
    lse_smem,
    loaded,
    q_loaded,
    *,
    config: DecodeConfig,
):
    """One worker's piece of the line; grid (W, K).

    GMEM: q [S, K, C, H], pool [B, K, P, 2H], tables [S, M], lens and the plan's arrays; out parts
    [S+W, K, H, C] and lse [S+W, K, C] in float32, of which (worker, list index) writes row worker + index.
    SMEM: kv [slots, tile, 2H] the ring, q [C, H], p [C, tile], lse [C]. Barriers: loaded [slots], q_loaded.
    Carries acc [H, C], m [C] and total [tile, C] in float32 per sequence, and the list index being fetched.
    """
    worker, head = lax.axis_index("worker"), lax.axis_index("head")
    slots, tile = config.slots, config.tile
    begin, end = bounds_ref[worker], bounds_ref[worker + 1]
    num_listed = starts_ref.shape[0] - 1

    def advance(item, flat):
        """The list index that the tile after `flat` belongs to."""
        return lax.min(item + (flat + 1 >= starts_ref[item + 1]).astype(jnp.int32), num_listed - 1)

    def fetch(blocks, slot):
        for j, (block, row) in enumerate(blocks):
            plgpu.copy_gmem_to_smem(
                pool_ref.at[block, head, pl.ds(row, config.rows)],
                kv_smem.at[slot, pl.ds(j * config.rows, config.rows)],
                loaded.at[slot],
            )

    def blocks_of(item, flat):
        return _blocks_of_tile(item, flat, pool_ref, tables_ref, lens_ref, seq_ids_ref, starts_ref, config)

    ahead = lax.min(first_ref[worker], num_listed - 1)
    for s in range(slots):
        pl.when(begin + s < end)(lambda s=s, item=ahead: fetch(blocks_of(item, begin + s), s))
        ahead = advance(ahead, begin + s)

    def attend_sequence(item, ahead):
        seq, start = seq_ids_ref[item], starts_ref[item]
        context = lens_ref[seq]
        low = _first_visible(context, config.sliding_window)
        offset = lax.div(low, tile) - start  # of a flat tile to the tile within the sequence
        plgpu.copy_gmem_to_smem(q_ref.at[seq, head], q_smem, q_loaded)
        plgpu.barrier_wait(q_loaded)

        def step(flat, carry):
            ahead, state = carry
            slot = lax.rem(flat - begin, slots)
            upcoming = blocks_of(ahead, flat + slots)  # read the table now, use it below: hides the latency
            plgpu.barrier_wait(loaded.at[slot])
            position = (flat + offset) * tile
            state = _attend_tile(state, kv_smem.at[slot], q_smem, p_smem, position, low, context, config)
            # the wgmma that read the slot are complete: their results have been read
            pl.when(flat + slots < end)(lambda: fetch(upcoming, slot))
            return advance(ahead, flat + slots), state

        cols, head_dim = q_smem.shape
        state = (
            gpu.full((head_dim, cols), 0.0, WGMMA),
            gpu.full((cols,), NO_MAXIMUM, WGMMA.reduce(0)),
            gpu.full((tile, cols), 0.0, WGMMA),
        )
        bounds = lax.max(begin, start), lax.min(end, starts_ref[item + 1])
        ahead, (acc, m, total) = lax.fori_loop(*bounds, step, (ahead, state))
        total = total.sum(axis=0)
        gpu.store(parts_ref.at[worker + item, head], acc / lax.broadcast_in_dim(total, acc.shape, [1]))
        lse_smem[...] = m + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[worker + item, head])
        plgpu.wait_smem_to_gmem(0)
        return ahead

    lax.fori_loop(first_ref[worker], last_ref[worker], attend_sequence, ahead)


def _blocks_of_tile(item, flat, pool_ref, tables_ref, lens_ref, seq_ids_ref, starts_ref, config: DecodeConfig):
    """Returns where the copies of tile `flat` of the line come from: [(block, first row in it)].

    Pieces that nothing in the tile needs are masked later; the nearest needed one is fetched in their stead,
    so that every tile has the same number of arrivals and no unused entry of the table is read.
    """
    seq = seq_ids_ref[item]
    context = lens_ref[seq]
    rows, copies = config.rows, config.copies
    low = _first_visible(context, config.sliding_window)
    piece = (lax.div(low, config.tile) + flat - starts_ref[item]) * copies
    lowest, highest = lax.div(low, rows), lax.div(context + (rows - 1), rows) - 1
    num_blocks = pool_ref.shape[0]
    found = []
    for j in range(copies):
        wanted = lax.max(lax.min(lax.max(piece + j, lowest), highest), 0)
        per_block = config.block_size // rows
        block = tables_ref[seq, lax.div(wanted, per_block)]
        block = lax.max(lax.min(block, num_blocks - 1), 0)  # a wrong id must not read outside the pool
        found.append((block, lax.rem(wanted, per_block) * rows))
    return found


def _attend_tile(state, kv_smem, q_smem, p_smem, position, low, context, config: DecodeConfig):
    """Folds the tile that starts at `position` into (acc, m, total), m in base 2 and scaled."""
    acc, m, total = state
    tile, head_dim = config.tile, q_smem.shape[1]
    k_smem, v_smem = kv_smem.at[:, pl.ds(0, head_dim)], kv_smem.at[:, pl.ds(head_dim, head_dim)]

    s = gpu.product(k_smem, gpu.transposed(q_smem))
    s, factor = gpu.scores_in_base_2(s, config.scale, config.logits_soft_cap)
    whole = (position + tile <= context) & (position >= low)
    s = lax.cond(whole, lambda s: s, lambda s: _mask_tile(s, v_smem, low - position, context - position), s)
    m_new = jnp.maximum(m, s.max(axis=0) * factor)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [1]))
    total = total * lax.broadcast_in_dim(alpha, total.shape, [1]) + p  # summed over the tokens at the end
    gpu.store_transposed(p_smem, p.astype(p_smem.dtype))
    plgpu.commit_smem()  # p, and V where it was masked, become visible to wgmma

    # a fresh accumulator: the sum below is one FMA per element, where rescaling alone would be one multiplication
    pv = gpu.product(gpu.transposed(v_smem), gpu.transposed(p_smem))
    return acc * lax.broadcast_in_dim(alpha, acc.shape, [1]) + pv, m_new, total


def _mask_tile(s, v_smem, first, last):
    """Clears the tile's tokens outside [first, last): their scores, and their V, as 0 * NaN is NaN."""
    tile, head_dim = v_smem.shape
    for c in range(0, head_dim, 64):  # in pieces, to spare registers
        v_piece = v_smem.at[:, pl.ds(c, 64)]
        token = plgpu.broadcasted_iota(jnp.int32, (tile, 64), 0, layout=WGMMA)
        v = plgpu.layout_cast(v_piece[...], WGMMA)
        v_piece[...] = jnp.where((token >= first) & (token < last), v, jnp.zeros_like(v))
    token = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA)
    return jnp.where((token >= first) & (token < last), s, MASKED)


def _combine_kernel(
    parts_ref, lse_ref, ranks_ref, starts_ref, bounds_ref, o_ref, out_smem, *, num_workers: int, group: int
):
    """Weighs the parts of one (sequence, KV head) and writes its G rows; grid (S, K).

    GMEM: as in `_decode_kernel`; out o [S, K, G, H]. SMEM: out [C, H]. A sequence that does not decode gets 0.
    """
    seq, head = lax.axis_index("seq"), lax.axis_index("head")
    cols, head_dim = out_smem.shape
    item = ranks_ref[seq]
    per_worker = lax.max(bounds_ref[1], 1)
    listed = lax.max(item, 0)
    first = lax.div(starts_ref[listed], per_worker)
    last = lax.select(item >= 0, lax.div(starts_ref[listed + 1] - 1, per_worker) + 1, first)

    def step(i, carry):
        acc, m, total = carry
        workers = [first + i * _COMBINE_UNROLL + u for u in range(_COMBINE_UNROLL)]
        rows = [lax.min(w, last - 1) + listed for w in workers]
        parts = [plgpu.load(parts_ref.at[row, head], layout=WGMMA, optimized=False) for row in rows]
        for w, row, part in zip(workers, rows, parts, strict=True):
            lse = plgpu.load(lse_ref.at[row, head], layout=WGMMA.reduce(0), optimized=False)
            lse = lse + lax.select(w < last, 0.0, MASKED)  # past the last part: one loaded twice
            m_new = jnp.maximum(m, lse)
            alpha, weight = jnp.exp2(m - m_new), jnp.exp2(lse - m_new)
            total = total * alpha + weight
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
            acc = acc + part * lax.broadcast_in_dim(weight, acc.shape, [1])
            m = m_new
        return acc, m, total

    state = (
        gpu.full((head_dim, cols), 0.0, WGMMA),
        gpu.full((cols,), NO_MAXIMUM, WGMMA.reduce(0)),
        gpu.full((cols,), 0.0, WGMMA.reduce(0)),
    )
    acc, _, total = lax.fori_loop(0, lax.div(last - first + (_COMBINE_UNROLL - 1), _COMBINE_UNROLL), step, state)
    total = jnp.where(total > 0, total, 1.0)
    out = (acc / lax.broadcast_in_dim(total, acc.shape, [1])).astype(out_smem.dtype)
    gpu.store(gpu.transposed(out_smem), out)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, group)], o_ref.at[seq, head])
    plgpu.wait_smem_to_gmem(0)


def decode(
    q: Float[Array, "S N H"],
    pool: Float[Array, "B K P two_H"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    decodes: Bool[Array, " S"],
    *,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    chip: gpu.GpuChip = gpu.HOPPER,
    tile: int = 64,
    num_workers: int | None = None,
    interpret: Any = False,
) -> Float[Array, "S N H"]:
    """Attends the last token of each sequence where `decodes`; the other rows come out as zeros.

    q, in the pool's dtype, has the pool's padded head size. `num_workers` per KV head: None fills the chip.
    """
    S, N, H = q.shape
    _, K, P, _ = pool.shape
    group = N // K
    cols = 8 * pl.cdiv(group, 8)
    slot_bytes = tile * 2 * H * pool.dtype.itemsize
    budget = _SLOTS_BYTES[0 if _SLOTS[0] * slot_bytes <= _SLOTS_BYTES[0] else 1]
    slots = min(_SLOTS[1], budget // slot_bytes)
    if num_workers is None:
        block_bytes = slots * slot_bytes + cols * (H + tile) * 2 + 4096  # barriers, alignment, the system's
        per_multiprocessor = max(1, chip.smem_per_multiprocessor_bytes // block_bytes)
        num_workers = pl.cdiv(chip.num_multiprocessors * per_multiprocessor, K)
    num_workers = min(num_workers, S * pl.cdiv(block_tables.shape[1] * P, tile))
    config = DecodeConfig(group, P, tile, slots, num_workers, float(scale), sliding_window, logits_soft_cap)
    plan = make_plan(decodes, context_lens, tile=tile, num_workers=num_workers, sliding_window=sliding_window)
    rows = jnp.pad(q.reshape(S, K, group, H), ((0, 0), (0, 0), (0, cols - group), (0, 0)))
    parts, lse = plgpu.kernel(
        functools.partial(_decode_kernel, config=config),
        out_type=(
            jax.ShapeDtypeStruct((S + num_workers, K, H, cols), jnp.float32),
            jax.ShapeDtypeStruct((S + num_workers, K, cols), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((slots, tile, 2 * H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((cols, H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((cols, tile), pool.dtype, transforms=gpu.mma_transforms(tile)),
            plgpu.SMEM((cols,), jnp.float32),
            plgpu.Barrier(num_arrivals=config.copies, num_barriers=slots),
            plgpu.Barrier(),
        ),
        grid=(num_workers, K),
        grid_names=("worker", "head"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, pool, block_tables, context_lens, *plan[:-1])
    out = plgpu.kernel(
        functools.partial(_combine_kernel, num_workers=num_workers, group=group),
        out_type=jax.ShapeDtypeStruct((S, K, group, H), q.dtype),
        scratch_types=(plgpu.SMEM((cols, H), q.dtype),),
        grid=(S, K),
        grid_names=("seq", "head"),
        kernel_name="paged_decode_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts, lse, plan.ranks, plan.starts, plan.bounds)
    return out.reshape(S, N, H)
