"""How big the tiles of the TPU kernels are, and what is refused: rules from shapes, a table by chip.

What bounds them. VMEM: two chunks of blocks (one computes, one arrives), the tiles of q and o, in a decode the new
tokens and the tiles on their way back, and the float32 accumulators; the sum stays under 48 MiB, which leaves a quarter
of the smallest VMEM (64 MiB: v5p, tpu7x) to XLA. SMEM (1 MiB): the block tables, at most half of it; a batch with more
is split.

What chose them: `jaxvllm bench kernel` on the nano workload (docs/kernels.md has the tables). In decode, sub-chunks
of 256 tokens: at 128 the latency of the matrix unit shows, at 512 the last sub-chunk of a sequence of some
hundred tokens is mostly padding. In prefill, 512 rows per KV head: a key is read again by every tile of queries,
and below 512 rows v6e's copies would take more than half of the products' time.
"""

from dataclasses import dataclass

import jax.numpy as jnp

LANES = 128
MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV_HEAD = 16
MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 256

_SMEM_TABLE_ENTRIES = 1 << 17  # int32s: half of the SMEM
_VMEM_BUDGET_BYTES = 48 << 20
_VMEM_SPILL_BYTES = 8 << 20  # room for what the compiler keeps of its own
_KV_BUFFER_BYTES = 8 << 20  # of one chunk
_Q_BYTES = 4 << 20  # of a decode's queries


@dataclass(frozen=True, kw_only=True)
class ChipRule:
    """What the chip decides; everything else follows from shapes."""

    decode_units: int = 8  # sequences times KV heads in a decode step
    decode_chunk: int = 1024  # tokens
    decode_sub_chunk: int = 256
    prefill_rows: int = 512  # query rows per KV head in a tile
    prefill_chunk: int = 512  # tokens
    prefill_sub_chunk: int = 512  # tokens, where masks are needed
    prefill_heads_at_once: int = 1  # KV heads in one body, so that one's products run under another's softmax
    sums_in_product: bool = False  # the matrix unit is wider than a head: columns of ones sum the weights for nothing
    cores: int = 1  # TensorCores behind one device; each takes its own KV heads


# On 256-wide matrix units the products are short: the softmax beside them has to be cheap, and to be overlapped. Of
# v6e's and tpu7x's forms (chunks of 512, 1,024, 2,048; 1, 2, 4 heads; sums by product or not) these have the fewest
# cycles. v5p: two cores look like one device.
CHIPS = {
    "v5e": ChipRule(),
    "v5p": ChipRule(cores=2),
    "v6e": ChipRule(decode_units=16, prefill_chunk=1024, prefill_heads_at_once=2, sums_in_product=True),
    "tpu7x": ChipRule(decode_units=16, prefill_heads_at_once=4, sums_in_product=True),
}
# as JAX names the devices
CHIP_OF_KIND = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a call is specialised for. `group` is the padded G, `lanes` the width of a padded query head."""

    num_tokens: int  # T
    num_seqs: int  # S
    num_kv_heads: int  # K
    group: int
    lanes: int
    row_width: int  # 2Hp
    block_size: int  # P
    blocks_per_seq: int  # M
    itemsize: int  # of the pool

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def sublanes(self) -> int:
        """Rows in a tile of the pool's dtype."""
        return 32 // self.itemsize


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    """W = seqs sequences of up to C = chunk tokens in a step, sub_chunk tokens in a matrix product."""

    seqs: int
    chunk: int
    sub_chunk: int
    grain: int  # tokens in the smallest copy
    head_groups: int
    seqs_per_call: int
    vmem_limit_bytes: int

    def row_group(self, group: int, num_heads: int, dtype) -> int:
        """Query rows that share a matrix product: a whole tile of sublanes, or the heads of one KV head."""
        return max(group, min(self.seqs * num_heads, 32 // jnp.dtype(dtype).itemsize))


@dataclass(frozen=True, kw_only=True)
class RaggedTiles:
    """Tiles of `queries` new tokens, or of `few` where no more are left, against chunks of `chunk` tokens.

    Where masks are needed a chunk is folded in by sub-chunks.
    """

    queries: int
    few: int
    chunk: int
    sub_chunk: int
    heads_at_once: int
    part_rows: int  # least rows of a part of a tile: a matrix unit's weights are loaded anew for each
    sums_in_product: bool
    grain: int
    head_groups: int
    seqs_per_call: int
    vmem_limit_bytes: int

    def parts_of_rows(self, num_kv_heads: int, rows: int) -> int:
        """Parts of a tile's rows that stand in for heads, where there are fewer than are taken at once."""
        return _power_below(min(self.heads_at_once // num_kv_heads, rows // self.part_rows))


def padded_group(group: int, num_kv_heads: int, dtype) -> int:
    """Query heads per KV head with padding: a power of two; in all 8 heads, or whole tiles of sublanes."""
    sublanes = 32 // jnp.dtype(dtype).itemsize
    padded = 1 << (group - 1).bit_length()
    while num_kv_heads * padded != 8 and num_kv_heads * padded % sublanes:
        padded *= 2
    return padded


def why_unsupported(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype) -> str | None:
    """Returns what the kernels are not made for in a model, in a sentence, or None."""
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim={head_dim} is above {MAX_HEAD_DIM}, the TPU kernels' limit."
    if num_heads > MAX_QUERIES_PER_KV_HEAD * num_kv_heads:
        return (
            f"{num_heads // num_kv_heads} query heads per KV head are more than the TPU kernels' "
            f"{MAX_QUERIES_PER_KV_HEAD}."
        )
    if block_size & (block_size - 1) or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        return (
            f"kvcache_block_size={block_size} is not a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, "
            "which the TPU's copies need."
        )
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernels have no cache of {jnp.dtype(dtype).name}: use bfloat16 or float32."
    return None


def decode_tiles(shape: Shape, chip: str | None = None) -> DecodeTiles:
    """Returns the tiles of a decode step; `chip` None is any."""
    rule = _rule(chip)
    cores = _head_groups(shape, rule)
    kv_heads, heads = shape.num_kv_heads // cores, shape.num_heads // cores
    fill = -(-shape.sublanes // heads)  # sequences that fill a matrix's rows
    seqs = max(fill, min(rule.decode_units // kv_heads, 1 << (shape.num_seqs - 1).bit_length()), 1)
    row_bytes = kv_heads * shape.row_width * shape.itemsize
    longest = _power_above(shape.blocks_per_seq * shape.block_size)
    chunk = min(rule.decode_chunk, longest, _power_below(_KV_BUFFER_BYTES // (seqs * row_bytes)))
    sub_chunk = max(shape.block_size, min(rule.decode_sub_chunk, chunk))
    chunk = max(chunk, sub_chunk)
    seq_bytes = shape.num_heads * shape.lanes * shape.itemsize
    tables = _SMEM_TABLE_ENTRIES // shape.blocks_per_seq
    if tables < seqs:
        raise ValueError(_table_too_long(shape))
    rows_bytes = seqs * heads * (shape.lanes * (shape.itemsize + 4) + 2 * LANES * 4)
    # of two steps: chunks of blocks, and tiles on their way back to the pool
    step_bytes = 2 * seqs * (chunk + shape.sublanes) * row_bytes
    windows = 4 * seq_bytes + 2 * 4 * kv_heads * shape.row_width  # of a sequence, two each: q, o, its new token
    room = (_VMEM_BUDGET_BYTES - step_bytes - rows_bytes) // windows
    per_call = max(min(tables, _Q_BYTES // seq_bytes, room) // seqs, 1) * seqs
    seqs_at_once = min(per_call, round_to(shape.num_seqs, seqs))
    return DecodeTiles(
        seqs=seqs,
        chunk=chunk,
        sub_chunk=sub_chunk,
        grain=min(shape.block_size, 16),
        head_groups=cores,
        seqs_per_call=per_call,
        vmem_limit_bytes=_vmem_limit(step_bytes + rows_bytes + seqs_at_once * windows),
    )


def ragged_tiles(shape: Shape, chip: str | None = None) -> RaggedTiles:
    """Returns the tiles of a step with several new tokens in a sequence; `chip` None is any."""
    rule = _rule(chip)
    cores = _head_groups(shape, rule)
    kv_heads, heads = shape.num_kv_heads // cores, shape.num_heads // cores
    wide = max(1, shape.lanes // LANES)
    few = shape.sublanes
    # at 4,096 rows in all the accumulators of a tile take 6 MiB
    # where a core has fewer KV heads than are taken at once, parts of a larger tile take their place
    tile_rows = rule.prefill_rows * _power_below(rule.prefill_heads_at_once // kv_heads)
    queries = min(tile_rows // shape.group, 4096 // (heads * wide), _power_above(shape.num_tokens))
    queries = max(few, _power_below(queries))
    row_bytes = kv_heads * shape.row_width * shape.itemsize
    longest = _power_above(shape.blocks_per_seq * shape.block_size)
    chunk = min(rule.prefill_chunk, max(LANES, longest))
    chunk = max(shape.block_size, min(chunk, _power_below(_KV_BUFFER_BYTES // row_bytes)))
    per_call = _SMEM_TABLE_ENTRIES // shape.blocks_per_seq
    if per_call == 0:
        raise ValueError(_table_too_long(shape))
    rows = queries * heads
    row_state = shape.lanes * (5 * shape.itemsize + 4) + 2 * LANES * 4
    return RaggedTiles(
        queries=queries,
        few=few,
        chunk=chunk,
        sub_chunk=max(shape.block_size, min(rule.prefill_sub_chunk, chunk)),
        heads_at_once=rule.prefill_heads_at_once,
        part_rows=rule.prefill_rows,
        sums_in_product=rule.sums_in_product and shape.lanes == LANES,
        grain=min(shape.block_size, 16),
        head_groups=cores,
        seqs_per_call=per_call,
        vmem_limit_bytes=_vmem_limit(2 * chunk * row_bytes + rows * row_state),
    )


def round_to(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _rule(chip: str | None) -> ChipRule:
    if chip is None:
        return ChipRule()
    if chip not in CHIPS:
        raise ValueError(f"chip={chip!r} has no tiles: use one of {', '.join(CHIPS)}, or none.")
    return CHIPS[chip]


def _head_groups(shape: Shape, rule: ChipRule) -> int:
    """KV heads are shared out to the cores where each gets whole tiles of query heads."""
    cores = rule.cores
    whole = shape.num_kv_heads % cores == 0 and shape.num_heads // cores % shape.sublanes == 0
    return cores if whole else 1


def _vmem_limit(needed: int) -> int:
    if needed > _VMEM_BUDGET_BYTES:
        raise ValueError(
            f"the tiles take {needed >> 20} MiB of VMEM, above {_VMEM_BUDGET_BYTES >> 20}: lower kvcache_block_size."
        )
    return needed + _VMEM_SPILL_BYTES


def _table_too_long(shape: Shape) -> str:
    return (
        f"a block table of {shape.blocks_per_seq} entries is above the {_SMEM_TABLE_ENTRIES} that SMEM holds: "
        "raise kvcache_block_size."
    )


def _power_above(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def _power_below(x: int) -> int:
    return 1 << max(x, 1).bit_length() - 1
