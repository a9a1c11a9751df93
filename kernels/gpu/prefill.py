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

from jaxvllm.kernels.gpu import common as gpu
from jaxvllm.kernels.gpu import ring as gpu_ring
from jaxvllm.kernels.gpu.common import NO_MAXIMUM, WGMMA
from jaxvllm.kernels.gpu.prefill_plan import (
    COMPUTE_GROUPS,
    ROWS,
    PrefillConfig,
    box_of,
    choose_ring,
    num_boxes,
    owners,
    query_tokens,
    segment_of,
)
from jaxvllm.kernels.gpu.prefill_tile import attend_tile

_PRODUCER = COMPUTE_GROUPS  # the index of the warpgroup that copies
_COMPUTE_REGISTERS, _PRODUCER_REGISTERS = 240, 24  # per thread: all in all, the register file


class _Refs(NamedTuple):
    """What the kernel reads and writes."""

    # GMEM
    q: Any  # [T, N*H]
    pool: Any  # [B, K, P, 2H]
    tables: Any  # [S, M]
    lens: Any  # [S]; 0: not for this kernel
    cu: Any  # [S+1]
    first: Any  # [tiles]; the sequences that own tokens of a query tile: first to last
    last: Any
    o: Any  # [T, N*H]
    # SMEM; q, p and columns once per compute warpgroup
    kv_smem: Any  # [slots, tile, 2H], the ring
    q_smem: Any  # [2, 64, H], later the output
    p_smem: Any  # [2, 64, tile]
    columns: Any  # [2, tile], 0 to tile - 1
    # barriers
    loaded: Any  # [slots]
    consumed: Any  # [slots]
    q_loaded: Any  # [2]
    cleared: Any


def _prefill_kernel(*refs, config: PrefillConfig):
    """One query tile of one KV head; grid (tiles, K), three warpgroups."""
    refs = _Refs(*refs)
    group_id = lax.axis_index("warpgroup")
    tile_id = refs.first.shape[0] - 1 - lax.axis_index("tile")  # the longest first: the chip empties evenly
    pl.when(group_id == _PRODUCER)(lambda: _produce(tile_id, refs, config))
    pl.when(group_id < COMPUTE_GROUPS)(lambda: _compute(tile_id, refs, config))


def _produce(tile_id, refs: _Refs, config: PrefillConfig):
    """Copies the K and V tiles that `_compute` looks at, in its order, each as soon as a slot is free."""
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
    head, ring = lax.axis_index("head"), config.ring
    token = tile_id * query_tokens(config.group)

    def produce_segment(seq, index):
        segment = segment_of(seq, token, refs.cu, refs.lens, config)
        needed = segment.low, segment.end + segment.shift

        def produce_tile(t, index):
            slot = lax.rem(index, ring.slots)
            pl.when(index >= ring.slots)(lambda: plgpu.barrier_wait(refs.consumed.at[slot]))
            for j in range(ring.copies):  # one after the other: 24 registers hold no more
                piece = t * ring.copies + j
                place = gpu_ring.locate(piece, needed, seq, refs.tables, refs.pool.shape[0], ring)
                gpu_ring.fetch(refs.pool, head, place, refs.kv_smem, slot, j, refs.loaded, ring)
            return index + 1

        return lax.fori_loop(segment.first, segment.last, produce_tile, index)

    lax.fori_loop(refs.first[tile_id], refs.last[tile_id], produce_segment, jnp.int32(0))


def _compute(tile_id, refs: _Refs, config: PrefillConfig):
    """Attends one warpgroup's 64 rows and writes their answers.

    Carries, in float32, acc [64, H], the maximum m [64] in base 2 and the weights' sum, total [64].
    """
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    head, group_id = lax.axis_index("head"), lax.axis_index("warpgroup")
    token = tile_id * query_tokens(config.group)
    q_rows, columns = refs.q_smem.at[group_id], refs.columns.at[group_id]
    head_dim = q_rows.shape[1]
    columns[...] = plgpu.broadcasted_iota(jnp.int32, columns.shape, 0, layout=WGMMA.reduce(0))

    def rows_of(b):
        return q_rows.at[pl.ds(pl.multiple_of(b * config.box, config.box), config.box)]

    # loops, since places known in advance would stay in registers from here to where they are written
    @pl.loop(0, config.boxes)
    def _load(b):
        source = box_of(b, head, group_id, token, config, head_dim)
        plgpu.copy_gmem_to_smem(refs.q.at[source], rows_of(b), refs.q_loaded.at[group_id])

    plgpu.barrier_wait(refs.q_loaded.at[group_id])
    first_token = token + (group_id * ROWS if config.group == 1 else 0)

    def attend_segment(seq, carry):
        segment = segment_of(seq, token, refs.cu, refs.lens, config)

        def step(t, carry):
            index, state = carry
            slot = lax.rem(index, config.ring.slots)
            plgpu.barrier_wait(refs.loaded.at[slot])
            smem = refs.kv_smem.at[slot], q_rows, refs.p_smem.at[group_id], columns
            state = attend_tile(state, smem, refs.cleared, t, first_token, segment, config)
            plgpu.barrier_arrive(refs.consumed.at[slot])
            return index + 1, state

        return lax.fori_loop(segment.first, segment.last, step, carry)

    row = WGMMA.reduce(1)
    state = (
        gpu.full((ROWS, head_dim), 0.0, WGMMA),
        gpu.full((ROWS,), NO_MAXIMUM, row),
        gpu.full((ROWS,), 0.0, row),
    )
    sequences = refs.first[tile_id], refs.last[tile_id]
    _, (acc, _, total) = lax.fori_loop(*sequences, attend_segment, (jnp.int32(0), state))
    total = jnp.where(total > 0, total, 1.0)
    q_rows[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(q_rows.dtype)
    plgpu.commit_smem()

    @pl.loop(0, num_boxes(group_id, config))
    def _write(b):
        plgpu.copy_smem_to_gmem(rows_of(b), refs.o.at[box_of(b, head, group_id, token, config, head_dim)])

    plgpu.wait_smem_to_gmem(0)


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
    interpret: Any = False,
) -> Float[Array, "T N H"]:
    """Attends the tokens of the sequences whose `context_lens` is above 0; the other rows hold nonsense.

    q, in the pool's dtype, has the pool's padded head size.
    """
    T, N, H = q.shape
    _, K, P, _ = pool.shape
    group = N // K
    tokens = query_tokens(group)
    num_tiles = pl.cdiv(T, tokens)
    padded = num_tiles * tokens
    ring = choose_ring(P, H)
    config = PrefillConfig(group, ring, float(scale), sliding_window, logits_soft_cap, bool(interpret))
    out = plgpu.kernel(
        functools.partial(_prefill_kernel, config=config),
        out_type=jax.ShapeDtypeStruct((padded, N * H), q.dtype),
        scratch_types=(
            plgpu.SMEM((ring.slots, ring.tile, 2 * H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((COMPUTE_GROUPS, ROWS, H), pool.dtype, transforms=gpu.mma_transforms(H)),
            plgpu.SMEM((COMPUTE_GROUPS, ROWS, ring.tile), pool.dtype, transforms=gpu.mma_transforms(ring.tile)),
            plgpu.SMEM((COMPUTE_GROUPS, ring.tile), jnp.int32),
            plgpu.Barrier(num_arrivals=ring.copies, num_barriers=ring.slots),
            plgpu.Barrier(num_arrivals=COMPUTE_GROUPS, num_barriers=ring.slots),
            plgpu.Barrier(num_arrivals=config.boxes, num_barriers=COMPUTE_GROUPS),
            plgpu.Barrier(num_arrivals=COMPUTE_GROUPS),
        ),
        grid=(num_tiles, K),
        grid_names=("tile", "head"),
        num_threads=COMPUTE_GROUPS + 1,
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
        *owners(cu_seqlens_q, num_tiles, tokens),
    )
    return out[:T].reshape(T, N, H)
