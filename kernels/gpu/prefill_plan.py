"""How prefill is cut into query tiles, and what of a tile belongs to which sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from jaxvllm.kernels.gpu.ring import Ring

ROWS = 64  # of one compute warpgroup: wgmma's M
COMPUTE_GROUPS = 2


class PrefillConfig(NamedTuple):
    """The static side of a prefill launch."""

    group: int  # G
    ring: Ring
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    interpreted: bool

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
    fitting = COMPUTE_GROUPS * ROWS // group
    return 1 << (fitting.bit_length() - 1)


def choose_ring(block_size: int, head_dim: int) -> Ring:
    """Returns the largest tiles whose scores stay in registers beside the output, and the slots that then fit."""
    return Ring(block_size, tile=64 if head_dim > 128 else 128, slots=3 if head_dim == 64 else 2)


def owners(
    cu_seqlens_q: Int32[Array, " S_plus_1"], num_tiles: int, tokens: int
) -> tuple[Int32[Array, " tiles"], Int32[Array, " tiles"]]:
    """Returns the sequences that own tokens of each query tile: the first, and one past the last."""
    begins = jnp.arange(num_tiles, dtype=jnp.int32)[:, None] * tokens
    ends = jnp.minimum(begins + tokens, cu_seqlens_q[-1])
    first = jnp.sum(cu_seqlens_q[None, 1:] <= begins, axis=1, dtype=jnp.int32)
    return first, jnp.sum(cu_seqlens_q[None, :-1] < ends, axis=1, dtype=jnp.int32)


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


def segment_of(seq, token, cu_ref, lens_ref, config: PrefillConfig) -> Segment:
    """Returns what the query tile that begins at `token` has of sequence `seq`."""
    tile = config.ring.tile
    context, after = lens_ref[seq], cu_ref[seq + 1]
    begin = lax.max(cu_ref[seq], token)
    end = lax.min(after, token + query_tokens(config.group))
    shift = context - after
    low = jnp.int32(0)
    if config.sliding_window is not None:
        low = lax.max(begin + shift - (config.sliding_window - 1), 0)
    first = lax.div(low, tile)
    last = lax.div(end + shift + (tile - 1), tile)
    last = lax.select((context > 0) & (begin < end), last, first)  # not for this kernel: no tiles
    return Segment(seq, begin, end, shift, context, low, first, last)


def box_of(b, head, group_id, token, config: PrefillConfig, head_dim: int):
    """Returns where box b of a warpgroup's rows lies in q: (tokens, columns).

    With one head per KV head the two warpgroups share its tokens; else each has heads of its own. A box without
    a head repeats the last head's.
    """
    if config.group == 1:
        return pl.ds(token + group_id * ROWS, ROWS), pl.ds(head * head_dim, head_dim)
    q_head = head * config.group + lax.min(group_id * config.boxes + b, config.group - 1)
    return pl.ds(token, config.box), pl.ds(q_head * head_dim, head_dim)


def num_boxes(group_id, config: PrefillConfig):
    """Returns how many of a warpgroup's boxes have a head."""
    if config.group == 1:
        return 1
    return lax.max(lax.min(config.group - group_id * config.boxes, config.boxes), 0)
