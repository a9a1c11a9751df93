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

from jaxvllm.kernels.gpu import common as gpu
from jaxvllm.kernels.gpu import ring as gpu_ring
from jaxvllm.kernels.gpu.common import MASKED, NO_MAXIMUM, WGMMA
from jaxvllm.kernels.gpu.decode_combine import combine
from jaxvllm.kernels.gpu.decode_plan import DecodeConfig, choose_ring, first_visible, make_plan, workers_that_fit


class _Refs(NamedTuple):
    """What the kernel reads and writes. W workers, C columns."""

    # GMEM, in: the plan's arrays are described in `DecodePlan`
    q: Any  # [S, K, C, H]
    pool: Any  # [B, K, P, 2H]
    tables: Any  # [S, M]
    lens: Any  # [S]
    seq_ids: Any
    starts: Any
    bounds: Any
    first: Any
    last: Any
    # GMEM, out, float32: (worker, list index) writes row worker + index
    parts: Any  # [S+W, K, H, C]
    lse: Any  # [S+W, K, C], base 2
    # SMEM
    kv_smem: Any  # [slots, tile, 2H], the ring
    q_smem: Any  # [C, H]
    p_smem: Any  # [C, tile]
    lse_smem: Any  # [C]
    # barriers
    loaded: Any  # [slots]
    q_loaded: Any


def _decode_kernel(*refs, config: DecodeConfig):
    """One worker's piece of the line, sequence after sequence; grid (W, K).

    Carries the list index of the tile that is fetched next.
    """
    refs = _Refs(*refs)
    worker = lax.axis_index("worker")
    slots = config.ring.slots
    begin, end = refs.bounds[worker], refs.bounds[worker + 1]

    ahead = lax.min(refs.first[worker], refs.seq_ids.shape[0] - 1)
    for s in range(slots):
        pl.when(begin + s < end)(
            lambda s=s, item=ahead: _fetch_tile(_places_of_tile(item, begin + s, refs, config), s, refs, config)
        )
        ahead = _item_after(ahead, begin + s, refs)

    def attend(item, ahead):
        return _attend_sequence(item, ahead, refs, config)

    lax.fori_loop(refs.first[worker], refs.last[worker], attend, ahead)


def _attend_sequence(item, ahead, refs: _Refs, config: DecodeConfig):
    """Attends the worker's tiles of the sequence at list index `item`, and leaves its part. Returns `ahead`.

    Carries, in float32, acc [H, C], the maximum m [C] in base 2 and the weights' sum, total [tile, C].
    """
    worker, head = lax.axis_index("worker"), lax.axis_index("head")
    slots, tile = config.ring.slots, config.ring.tile
    begin, end = refs.bounds[worker], refs.bounds[worker + 1]
    seq, start = refs.seq_ids[item], refs.starts[item]
    context = refs.lens[seq]
    low = first_visible(context, config.sliding_window)
    offset = lax.div(low, tile) - start  # of a tile of the line to the tile within the sequence
    plgpu.copy_gmem_to_smem(refs.q.at[seq, head], refs.q_smem, refs.q_loaded)
    plgpu.barrier_wait(refs.q_loaded)

    def step(flat, carry):
        ahead, state = carry
        slot = lax.rem(flat - begin, slots)
        upcoming = _places_of_tile(ahead, flat + slots, refs, config)  # read now, used below: hides the latency
        plgpu.barrier_wait(refs.loaded.at[slot])
        position = (flat + offset) * tile
        kv_smem = refs.kv_smem.at[slot]
        state = _attend_tile(state, kv_smem, refs.q_smem, refs.p_smem, position, low, context, config)
        # the wgmma that read the slot are complete: their results have been read
        pl.when(flat + slots < end)(lambda: _fetch_tile(upcoming, slot, refs, config))
        return _item_after(ahead, flat + slots, refs), state

    cols, head_dim = refs.q_smem.shape
    state = (
        gpu.full((head_dim, cols), 0.0, WGMMA),
        gpu.full((cols,), NO_MAXIMUM, WGMMA.reduce(0)),
        gpu.full((tile, cols), 0.0, WGMMA),
    )
    bounds = lax.max(begin, start), lax.min(end, refs.starts[item + 1])
    ahead, (acc, m, total) = lax.fori_loop(*bounds, step, (ahead, state))
    total = total.sum(axis=0)
    gpu.store(refs.parts.at[worker + item, head], acc / lax.broadcast_in_dim(total, acc.shape, [1]))
    refs.lse_smem[...] = m + jnp.log2(total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.lse_smem, refs.lse.at[worker + item, head])
    plgpu.wait_smem_to_gmem(0)
    return ahead


def _item_after(item, flat, refs: _Refs):
    """Returns the list index that the tile after `flat` belongs to, `flat` being of `item`."""
    return lax.min(item + (flat + 1 >= refs.starts[item + 1]).astype(jnp.int32), refs.seq_ids.shape[0] - 1)


def _places_of_tile(item, flat, refs: _Refs, config: DecodeConfig):
    """Returns where in the pool the pieces of tile `flat` of the line lie."""
    ring = config.ring
    seq = refs.seq_ids[item]
    context = refs.lens[seq]
    low = first_visible(context, config.sliding_window)
    piece = (lax.div(low, ring.tile) + flat - refs.starts[item]) * ring.copies
    num_blocks = refs.pool.shape[0]
    return [gpu_ring.locate(piece + j, (low, context), seq, refs.tables, num_blocks, ring) for j in range(ring.copies)]


def _fetch_tile(places, slot, refs: _Refs, config: DecodeConfig):
    head = lax.axis_index("head")
    for j, place in enumerate(places):
        gpu_ring.fetch(refs.pool, head, place, refs.kv_smem, slot, j, refs.loaded, config.ring)


def _attend_tile(state, kv_smem, q_smem, p_smem, position, low, context, config: DecodeConfig):
    """Folds the tile that starts at `position` into (acc, m, total), m in base 2 and scaled."""
    acc, m, total = state
    tile, head_dim = config.ring.tile, q_smem.shape[1]
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
    itemsize = pool.dtype.itemsize
    ring = choose_ring(P, tile, tile * 2 * H * itemsize)
    if num_workers is None:
        smem_bytes = (ring.slots * tile * 2 * H + cols * (H + tile)) * itemsize
        num_workers = workers_that_fit(chip, K, smem_bytes)
    num_workers = min(num_workers, S * pl.cdiv(block_tables.shape[1] * P, tile))
    config = DecodeConfig(ring, float(scale), sliding_window, logits_soft_cap)
    plan = make_plan(decodes, context_lens, tile=tile, num_workers=num_workers, sliding_window=sliding_window)
    rows = jnp.pad(q.reshape(S, K, group, H), ((0, 0), (0, 0), (0, cols - group), (0, 0)))
    parts, lse = plgpu.kernel(
        functools.partial(_decode_kernel, config=config),
        out_type=(
            jax.ShapeDtypeStruct((S + num_workers, K, H, cols), jnp.float32),
            jax.ShapeDtypeStruct((S + num_workers, K, cols), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((ring.slots, tile, 2 * H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((cols, H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((cols, tile), pool.dtype, transforms=gpu.mma_transforms(tile)),
            plgpu.SMEM((cols,), jnp.float32),
            plgpu.Barrier(num_arrivals=ring.copies, num_barriers=ring.slots),
            plgpu.Barrier(),
        ),
        grid=(num_workers, K),
        grid_names=("worker", "head"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(rows, pool, block_tables, context_lens, *plan[:-1])
    return combine(parts, lse, plan, group=group, dtype=q.dtype, interpret=interpret).reshape(S, N, H)
