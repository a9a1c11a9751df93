"""The ring of K and V tiles in shared memory, which the GPU kernels keep full with TMA copies out of the pool."""

from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Ring(NamedTuple):
    """Its static side. A "piece" is what one copy moves: `rows` consecutive tokens of one block and KV head."""

    block_size: int  # P
    tile: int  # tokens per slot
    slots: int

    @property
    def rows(self) -> int:
        """Tokens per copy: a block, or a tile's worth of it."""
        return min(self.block_size, self.tile)

    @property
    def copies(self) -> int:
        """Copies per tile."""
        return self.tile // self.rows


def locate(piece, needed, seq, tables_ref, num_blocks: int, ring: Ring):
    """Returns where a sequence's piece lies in the pool: (block, first row in it).

    `needed` is the first token that anything looks at, and one past the last. A piece without any is masked later; the
    nearest needed one is fetched in its stead, so that every tile has the same number of arrivals and no unused entry
    of the table is read.
    """
    rows, per_block = ring.rows, ring.block_size // ring.rows
    first, last = needed
    lowest, highest = lax.div(first, rows), lax.div(last + (rows - 1), rows) - 1
    wanted = lax.max(lax.min(lax.max(piece, lowest), highest), 0)
    block = tables_ref[seq, lax.div(wanted, per_block)]
    block = lax.max(lax.min(block, num_blocks - 1), 0)  # a wrong id must not read outside the pool
    return block, lax.rem(wanted, per_block) * rows


def fetch(pool_ref, head, place, kv_smem, slot, j: int, loaded, ring: Ring):
    """Starts the copy of the piece at `place` (see `locate`) into place j of a slot; it arrives at `loaded[slot]`."""
    block, row = place
    plgpu.copy_gmem_to_smem(
        pool_ref.at[block, head, pl.ds(row, ring.rows)],
        kv_smem.at[slot, pl.ds(j * ring.rows, ring.rows)],
        loaded.at[slot],
    )
