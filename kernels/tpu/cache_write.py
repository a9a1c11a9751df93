"""Writes new keys and values into their blocks on the TPU, in place whatever their number.

XLA's scatter would do for a few: from 1,024 tokens on it copies the whole pool into another layout and back. A
copy to HBM moves whole tiles of rows, so the tokens are taken in runs, consecutive slots within one tile: a run's
tile is fetched (unless all of it is new), its new rows put in, and the tile sent back, several tiles in flight.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels.tpu import arithmetic as tpu

_IN_FLIGHT = 8  # tiles: four on their way here, four on their way back


def _write_kernel(
    starts, lengths, slots, num_runs, rows_hbm, _, pool, tiles, rows, row_sem, tile_sem, send_sem
):  # fmt: skip
    """One pass over the runs, grid (1,).

    SMEM: starts, lengths, slots [T] (first token, tokens, first slot of each run), num_runs [1].
    HBM: rows_hbm [2Hp/128, K, T, 128] float32, pool [B, K, P, 2Hp].
    VMEM: tiles [8, K, grain, 2Hp], rows [8, 2Hp/128, K, grain, 128] float32. A semaphore per tile and direction.
    """
    depth, _, grain, _ = tiles.shape
    P = pool.shape[2]

    def tile_of(i):
        slot = tpu.quotient(slots[i], grain) * grain
        inside = pl.multiple_of(slot & (P - 1), grain)
        return pool.at[tpu.quotient(slot, P), :, pl.ds(inside, grain)]

    def each_fetch(i, act):
        at, size, offset = i & (depth - 1), lengths[i], slots[i] & (grain - 1)
        new = rows_hbm.at[:, :, pl.ds(starts[i], size)]
        act(pltpu.make_async_copy(new, rows.at[at, :, :, pl.ds(offset, size)], row_sem.at[at]))
        old = pltpu.make_async_copy(tile_of(i), tiles.at[at], tile_sem.at[at])
        pl.when(size < grain)(lambda: act(old))

    def send(i):
        at = i & (depth - 1)
        return pltpu.make_async_copy(tiles.at[at], tile_of(i), send_sem.at[at])

    def fetch(i):
        @pl.when(i < num_runs[0])
        def _():
            pl.when(i >= depth)(lambda: send(i - depth).wait())
            each_fetch(i, lambda copy: copy.start())

    def put(i, _):
        fetch(i + depth // 2)
        each_fetch(i, lambda copy: copy.wait())
        at, size, offset = i & (depth - 1), lengths[i], slots[i] & (grain - 1)
        row = lax.broadcasted_iota(jnp.int32, rows.shape[2:], 1)
        is_new = (row >= offset) & (row < offset + size)
        for j in range(rows.shape[1]):
            lanes = pl.ds(j * tpu.LANES, tpu.LANES)
            tiles[at, :, :, lanes] = jnp.where(is_new, rows[at, j].astype(tiles.dtype), tiles[at, :, :, lanes])
        send(i).start()

    for i in range(depth // 2):
        fetch(i)
    lax.fori_loop(0, num_runs[0], put, None)
    lax.fori_loop(jnp.maximum(num_runs[0] - depth, 0), num_runs[0], lambda i, _: send(i).wait(), None)


def plan(slot_mapping: Int32[Array, " T"], num_slots: int, grain: int) -> tuple[Array, Array, Array, Array]:
    """Returns the runs: first tokens [T], lengths [T], first slots [T], their number [1].

    The same for every layer of a step: XLA computes it once.
    """
    T = slot_mapping.shape[0]
    token = jnp.arange(T, dtype=jnp.int32)
    valid = (slot_mapping >= 0) & (slot_mapping < num_slots)
    before = jnp.concatenate([jnp.full((1,), -2, jnp.int32), slot_mapping[:-1]])
    begins = valid & ((slot_mapping != before + 1) | (slot_mapping % grain == 0))
    # a run ends where the next begins, or where the padding does
    breaks = jnp.where(begins | ~valid, token, T)
    end = jnp.concatenate([lax.cummin(breaks, reverse=True)[1:], jnp.full((1,), T, jnp.int32)])
    starts = jnp.nonzero(begins, size=T, fill_value=0)[0].astype(jnp.int32)
    return starts, (end - token)[starts], slot_mapping[starts], begins.sum(dtype=jnp.int32)[None]


def join_rows(
    k: Float[Array, "T K H"], v: Float[Array, "T K H"], pool: Float[Array, "B K P two_Hp"]
) -> Float[Array, "T K two_Hp"]:
    """Returns the rows that the pool keeps of new tokens: a key, a value, each padded to its half."""
    padding = ((0, 0), (0, 0), (0, pool.shape[3] // 2 - k.shape[-1]))
    return jnp.concatenate([jnp.pad(k, padding), jnp.pad(v, padding)], axis=-1).astype(pool.dtype)


def write(
    pool: Float[Array, "B K P two_Hp"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
) -> Float[Array, "B K P two_Hp"]:
    """See `paged_attention.write`. Tokens of one tile must stand together, in the order of their slots.

    They do: a step's new tokens of one sequence are consecutive, and a block being written has one owner.
    """
    B, K, P, two_hp = pool.shape
    grain = min(P, 32 // pool.dtype.itemsize)
    # a copy may start at any row only where rows have 32 bits and 128 lanes
    new = join_rows(k, v, pool).astype(jnp.float32).reshape(-1, K, two_hp // tpu.LANES, tpu.LANES).transpose(2, 1, 0, 3)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    per_tile = pltpu.SemaphoreType.DMA((_IN_FLIGHT,))
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((_IN_FLIGHT, K, grain, two_hp), pool.dtype),
                pltpu.VMEM((_IN_FLIGHT, two_hp // tpu.LANES, K, grain, tpu.LANES), jnp.float32),
                per_tile,
                per_tile,
                per_tile,
            ],
        ),
        out_shape=pltpu.HBM(pool.shape, pool.dtype),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="paged_cache_write",
    )(
        *plan(slot_mapping, B * P, grain),
        pltpu.with_memory_space_constraint(new, pltpu.HBM),
        pltpu.with_memory_space_constraint(pool, pltpu.HBM),
    )
