"""How a decode step is cut into equal pieces: what the host's program computes before the decode kernel runs."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from jaxvllm.kernels.gpu.common import GpuChip
from jaxvllm.kernels.gpu.ring import Ring

_RING_BYTES = (98_304, 196_608)  # so that two workers fit a multiprocessor, or else one
_SLOTS = (3, 4)  # at least, at most
_SYSTEM_BYTES = 4096  # of a thread block's shared memory: barriers, alignment, the system's


class DecodeConfig(NamedTuple):
    """The static side of a decode launch."""

    ring: Ring
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


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
    first_tile = first_visible(context_lens, sliding_window) // tile
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


def first_visible(context, sliding_window: int | None):
    """Returns the first position that the last token of `context` sees."""
    return 0 if sliding_window is None else jnp.maximum(context - sliding_window, 0)


def choose_ring(block_size: int, tile: int, slot_bytes: int) -> Ring:
    """Returns the ring that leaves room for a second worker on the multiprocessor, where that is deep enough."""
    budget = _RING_BYTES[0 if _SLOTS[0] * slot_bytes <= _RING_BYTES[0] else 1]
    return Ring(block_size, tile, min(_SLOTS[1], budget // slot_bytes))


def workers_that_fit(chip: GpuChip, num_kv_heads: int, smem_bytes: int) -> int:
    """Returns the workers per KV head that fill a chip, each with so much shared memory."""
    per_multiprocessor = max(1, chip.smem_per_multiprocessor_bytes // (smem_bytes + _SYSTEM_BYTES))
    return pl.cdiv(chip.num_multiprocessors * per_multiprocessor, num_kv_heads)
