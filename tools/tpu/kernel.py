"""What the TPU kernels cost by count: bytes, operations and cycles of a batch, and the time predicted from them.

Nothing here is a measurement of a device. Bytes and trips are counted as the kernels' loops take them; cycles are the
compiler's own schedule; bandwidth, peak and clock are published figures (`jaxvllm.aot.chips`). The prediction is

    seconds = max(bytes / bandwidth, cycles / clock) + first copy

since copies and products overlap, a step's copies under the products of the step before.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.aot.chips import find_chip, lower_for
from jaxvllm.kernels import kv_cache, paged_attention
from jaxvllm.kernels.paged_attention import AttentionBatch
from jaxvllm.kernels.tpu import backend as paged_attention_tpu
from jaxvllm.kernels.tpu import tiles as tpu_tiles
from tools.tpu.schedule import Case, Region, read_schedule

WORKLOADS = {"nano": (256, 100, 1024), "long": (16, 32768, 32768)}  # sequences, shortest, longest
HEADS = {"Qwen3-0.6B": (16, 8, 128), "Qwen3-8B": (32, 8, 128), "Qwen3-8B/4": (8, 2, 128), "Qwen3-8B/8": (4, 1, 128)}

_JAX_QUERIES = 32  # in a tile of JAX's kernel, where its table has no entry


def context_lens(workload: str, seed: int = 0) -> list[int]:
    """Returns the lengths of a workload's sequences, evenly random between its bounds."""
    count, low, high = WORKLOADS[workload]
    return np.random.default_rng(seed).integers(low, high + 1, count).tolist()


def shape_of(case: Case) -> tpu_tiles.Shape:
    """Returns the shape that the kernel is specialised for."""
    pool = kv_cache.pool_shape(1, case.num_kv_heads, case.block_size, case.head_dim, "tpu")
    q = _array(case.num_tokens, case.num_heads, case.head_dim, dtype=case.dtype)
    tables = _array(case.num_seqs, -(-case.max_context // case.block_size))
    return paged_attention_tpu.shape_of(q, _array(*pool, dtype=case.dtype), tables)


def _array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def our_attend(case: Case) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Returns what a step runs of a case's kernel, with the tiles of its chip, and what it takes, the pool first.

    A decode writes its tokens in the same kernel; in front of a ragged one stands a write, which is not here.
    """
    options = {"scale": case.head_dim**-0.5, "backend": f"tpu:{case.chip}"}

    def decode(pool, q, k, v, *integers):
        return paged_attention.write_and_attend(q, k, v, pool, AttentionBatch(*integers), decode_only=True, **options)

    def ragged(pool, q, *integers):
        return paged_attention.attend(q, pool, *integers, **options)

    pool = kv_cache.pool_shape(4096, case.num_kv_heads, case.block_size, case.head_dim, "tpu")
    S, T, M = case.num_seqs, case.num_tokens, shape_of(case).blocks_per_seq
    pool, q = _array(*pool, dtype=case.dtype), _array(T, case.num_heads, case.head_dim, dtype=case.dtype)
    integers = [_array(S, M), _array(S), _array(S + 1), _array(1)]
    if case.kernel == "ragged":
        return ragged, [pool, q, *integers]
    new = _array(T, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    return decode, [pool, q, new, new, _array(T), *integers]


def lower_attend(case: Case) -> jax.stages.Lowered:
    """Lowers `our_attend` of a case for its chip, which need not be here."""
    attend, arguments = our_attend(case)
    return lower_for(case.chip, attend, *arguments, donate=(0,) if case.kernel == "decode" else ())


@dataclass(kw_only=True)
class Trips:
    """How often the loops of a decode run, and the bytes their copies move."""

    steps: int = 0
    whole_copies: int = 0
    part_copies: int = 0
    inside: int = 0  # sub-chunks without masks
    boundary: int = 0
    kv_bytes: int = 0
    io_bytes: int = 0  # queries and answers
    floor_bytes: int = 0  # each live key and value once, queries and answers
    write_bytes: int = 0  # new keys and values in float32, a tile of rows sent back for each
    write_floor_bytes: int = 0  # new keys and values read, and written
    separate_write_bytes: int = 0  # what `tpu_cache_write` would move in place of write_bytes


def count_decode(lens: list[int], case: Case) -> Trips:
    """Walks the loops of `tpu_decode` over a batch, as the kernel does."""
    shape = shape_of(case)
    tiles = tpu_tiles.decode_tiles(shape, case.chip)
    P, W, C, CC, grain = shape.block_size, tiles.seqs, tiles.chunk, tiles.sub_chunk, tiles.grain
    row_bytes = shape.num_kv_heads * shape.row_width * shape.itemsize
    live_row_bytes = 2 * case.num_kv_heads * case.head_dim * shape.itemsize
    trips = Trips(io_bytes=2 * len(lens) * shape.num_heads * shape.lanes * shape.itemsize)
    lens = lens if W == 1 else sorted(lens, reverse=True)
    for begin in range(0, len(lens), W):
        group = (lens[begin : begin + W] + [0] * W)[:W]
        for c in range(-(-max(group) // C)):
            lives = [min(max(n - c * C, 0), C) for n in group]
            trips.steps += 1
            trips.whole_copies += sum(live // P for live in lives)
            trips.part_copies += sum(live % P > 0 for live in lives)
            trips.kv_bytes += row_bytes * sum(-(-live // grain) * grain for live in lives)
            trips.inside += min(lives) // CC
            trips.boundary += -(-max(lives) // CC) - min(lives) // CC
    io_floor = 2 * len(lens) * case.num_heads * case.head_dim * shape.itemsize
    trips.floor_bytes = sum(lens) * live_row_bytes + io_floor
    tile_bytes, new_bytes = row_bytes * shape.sublanes, 4 * shape.num_kv_heads * shape.row_width
    trips.write_bytes = len(lens) * (new_bytes + tile_bytes)
    trips.separate_write_bytes = len(lens) * (new_bytes + 2 * tile_bytes)
    trips.write_floor_bytes = 2 * len(lens) * live_row_bytes
    return trips


def decode_cycles(regions: list[Region], trips: Trips) -> tuple[int, tuple[int, int]]:
    """Returns the cycles of a batch by the schedule, and those of a sub-chunk inside and at a boundary.

    The flat loop's own regions run once a step (begin, finish and new tokens too, which is too many where a sequence
    has several chunks); inner loops without products are copies. tpu7x takes a part's copy as a loop of two, after the
    whole ones.
    """
    first = next(i for i, r in enumerate(regions) if r.mxu and r.depth == 2)
    start = max(i for i in range(first) if regions[i].depth == 1 and regions[i].begins_loop)
    body = regions[start:]
    inside, boundary = (r.bundles for r in [r for r in body if r.mxu][:2])
    per_step = sum(r.bundles for r in body if r.depth == 1 or (r.depth == 2 and not r.begins_loop and not r.mxu))
    loops = [r.bundles for r in body if r.depth == 2 and r.begins_loop and not r.mxu]
    whole = max(loops)
    cycles = trips.steps * per_step + trips.whole_copies * whole + trips.inside * inside + trips.boundary * boundary
    if len(loops) % 2 == 0:  # a part copied by a loop of its own
        cycles += 2 * trips.part_copies * whole
    return cycles, (inside, boundary)


def jax_tokens_per_block(case: Case) -> int:
    """Tokens that JAX's own `ragged_paged_attention` fetches at a time, by its table for the chip."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as tuned

    dtype, M = jnp.dtype(case.dtype).name, shape_of(case).blocks_per_seq
    chips = {"v5e": "TPU v5", "v6e": "TPU v6"}  # those it has
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, case.block_size, case.num_tokens, M)
    key = tuned.simplify_key((dtype, dtype, *shape))
    pages, _ = tuned.TUNED_BLOCK_SIZES.get(chips.get(case.chip, ""), {}).get(key, (128, 32))
    return min(M, pages) * case.block_size


def count_jax_decode(lens: list[int], case: Case) -> int:
    """Bytes that JAX's own kernel moves: a fetch is always a whole number of its blocks of pages."""
    itemsize, step = jnp.dtype(case.dtype).itemsize, jax_tokens_per_block(case)
    row_bytes = 2 * case.num_kv_heads * case.head_dim * itemsize
    io_bytes = 2 * len(lens) * case.num_heads * case.head_dim * itemsize
    return row_bytes * sum(-(-n // step) * step for n in lens) + io_bytes


def count_prefill(case: Case) -> int:
    """Bytes of keys and values that `tpu_ragged` moves for one prompt: a tile of queries reads what it sees."""
    shape = shape_of(case)
    Q = tpu_tiles.ragged_tiles(shape, case.chip).queries
    seen = sum(min(first + Q, case.num_tokens) for first in range(0, case.num_tokens, Q))
    return seen * shape.num_kv_heads * shape.row_width * shape.itemsize


def count_jax_prefill(case: Case) -> int:
    """Bytes that JAX's own kernel moves for one prompt: every tile of 32 queries reads the whole context."""
    itemsize, step = jnp.dtype(case.dtype).itemsize, jax_tokens_per_block(case)
    row_bytes = 2 * case.num_kv_heads * case.head_dim * itemsize
    return -(-case.num_tokens // _JAX_QUERIES) * -(-case.num_tokens // step) * step * row_bytes


def jax_attend(case: Case) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Returns JAX's own kernel for the same case, with the tiles of its table, and what it takes."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as theirs

    def attend(*arguments):
        return theirs.ragged_paged_attention(
            *arguments,
            sm_scale=case.head_dim**-0.5,
            num_kv_pages_per_block=jax_tokens_per_block(case) // case.block_size,
            num_queries_per_block=min(case.num_tokens, _JAX_QUERIES),
            vmem_limit_bytes=100 << 20,  # its default tiles take 65 MiB of long contexts
        )

    S, T, M = case.num_seqs, case.num_tokens, shape_of(case).blocks_per_seq
    q = _array(T, case.num_heads, case.head_dim, dtype=case.dtype)
    pages = _array(4096, case.block_size, 2 * case.num_kv_heads, case.head_dim, dtype=case.dtype)
    return attend, [q, pages, _array(S), _array(S, M), _array(S + 1), _array(1)]


def lower_jax_attend(case: Case) -> jax.stages.Lowered:
    """Lowers `jax_attend` of a case for its chip."""
    attend, arguments = jax_attend(case)
    return lower_for(case.chip, attend, *arguments)


def prefill_cycles(regions: list[Region], case: Case) -> dict[str, float]:
    """Returns a core's cycles of a whole prompt by the schedule, and those of a head's fold inside and at an edge.

    The last two regions with products are one turn of the fold over whole chunks, `heads_at_once` heads of it, and
    one over a masked sub-chunk. Loops without products: copies; turning and clearing a small tile, a large one;
    turning back a small one, a large one. Heads that are turned at once are no loop, and stand in the step's own
    regions, which is too often.
    """
    shape = shape_of(case)
    tiles = tpu_tiles.ragged_tiles(shape, case.chip)
    K, N = (heads // tiles.head_groups for heads in (shape.num_kv_heads, shape.num_heads))  # of a core
    Q, C = tiles.queries, tiles.chunk
    inside, masked = (r.bundles for r in [r for r in regions if r.mxu][-2:])
    inside /= min(tiles.heads_at_once, K)
    starts = range(0, case.num_tokens, Q)
    whole = sum(first // C for first in starts)
    edges = sum(-(-(first % C + Q) // tiles.sub_chunk) for first in starts)
    loops = [r.bundles for r in regions if r.depth == 2 and r.begins_loop and not r.mxu and r.bundles > 1]
    turns = N // min(N, shape.sublanes)
    tile = K * loops[-1] if turns == 1 else turns * (loops[-4] + loops[-1]) + K * loops[-3]
    steps = whole + len(starts)
    step = sum(r.bundles for r in regions if r.depth == 1 and not r.mxu)
    return {
        "whole_fold": inside,
        "edge_fold": masked,
        "tile": tile,
        "all": K * (whole * inside + edges * masked) + len(starts) * tile + steps * step,
    }


def prefill_report(chip: str, heads: tuple[int, int, int], num_tokens: int, block_size: int) -> dict:
    """Counts one prompt of `num_tokens`, one layer: products by the schedule against the matrix units' floor.

    The floor is rows through weights: a unit of width w takes tiles of w by w, `mxu_rows_per_cycle` rows a cycle,
    and half of a 256-wide unit stands idle where a head has 128 numbers. The floor of all counts causal halves.
    """
    N, K, H = heads
    case = Case(
        chip=chip, kernel="ragged", num_heads=N, num_kv_heads=K, head_dim=H, block_size=block_size,
        max_context=num_tokens, num_seqs=16, num_tokens=num_tokens,
    )  # fmt: skip
    shape, facts = shape_of(case), find_chip(chip)
    tiles = tpu_tiles.ragged_tiles(shape, chip)
    Q, C, rows = tiles.queries, tiles.chunk, tiles.queries * shape.group
    regions, compile_s = read_schedule(case)
    cycles = prefill_cycles(regions, case)
    width = facts.mxu_width
    weight_tiles = 2 * (C / width) * -(-shape.lanes // width)
    floor = rows * weight_tiles / facts.mxu_rows_per_cycle / (facts.mxus / facts.cores)  # of a head, on one core
    seen = sum(first + (Q + 1) / 2 for first in range(0, num_tokens, Q))  # tokens, on average by a tile's rows
    kv_bytes = count_prefill(case)
    copy_s = kv_bytes / facts.hbm_bytes_per_s
    return {
        "tile": (Q, C),
        "fold_cycles": cycles["whole_fold"],
        "edge_cycles": cycles["edge_fold"],
        "mxu_floor_cycles": floor,
        "fold_over_floor": cycles["whole_fold"] / floor,
        "peak_floor_cycles": 4 * rows * C * H / (facts.flops_per_s / facts.cores) * facts.clock_hz,
        "tile_cycles": cycles["tile"],
        "cycles": cycles["all"],
        "all_over_floor": cycles["all"] / (K // tiles.head_groups * floor * seen / C),
        "copy_over_products": copy_s / (cycles["all"] / facts.clock_hz),
        "flops": 4 * N * H * num_tokens * (num_tokens + 1) // 2,
        "bytes_moved": kv_bytes,
        "jax_bytes_moved": count_jax_prefill(case),
        "compile_s": compile_s,
    }


def decode_report(chip: str, heads: tuple[int, int, int], workload: str, block_size: int) -> dict:
    """Counts and predicts one decode step's attention of one layer."""
    lens = context_lens(workload)
    N, K, H = heads
    case = Case(
        chip=chip, kernel="decode", num_heads=N, num_kv_heads=K, head_dim=H, block_size=block_size,
        max_context=WORKLOADS[workload][2], num_seqs=len(lens), num_tokens=len(lens),
    )  # fmt: skip
    trips, facts = count_decode(lens, case), find_chip(chip)
    regions, compile_s = read_schedule(case)
    cycles, (inside, boundary) = decode_cycles(regions, trips)
    attended = trips.kv_bytes + trips.io_bytes
    moved = attended + trips.write_bytes
    copy_s, compute_s = moved / facts.hbm_bytes_per_s, cycles / facts.clock_hz
    tiles = tpu_tiles.decode_tiles(shape_of(case), chip)
    sub_bytes = tiles.seqs * tiles.sub_chunk * 2 * K * H * jnp.dtype(case.dtype).itemsize
    sub_copy_cycles = sub_bytes / facts.hbm_bytes_per_s * facts.clock_hz
    return {
        "bytes_moved": moved,
        "bytes_floor": trips.floor_bytes + trips.write_floor_bytes,
        "attention_bytes_ratio": attended / trips.floor_bytes,
        "write_bytes": trips.write_bytes,
        "separate_write_bytes": trips.separate_write_bytes,
        "jax_bytes_ratio": count_jax_decode(lens, case) / trips.floor_bytes,
        "jax_tokens_per_fetch": jax_tokens_per_block(case),
        "flops": 4 * sum(lens) * N * H,
        "cycles": cycles,
        "sub_chunk_cycles": inside,
        "boundary_cycles": boundary,
        "sub_chunk_copy_cycles": sub_copy_cycles,
        "sub_chunk_ratio": inside / sub_copy_cycles,
        "compute_over_copy": compute_s / copy_s,
        "predicted_s": max(copy_s, compute_s) + moved / max(trips.steps, 1) / facts.hbm_bytes_per_s,
        "compile_s": compile_s,
    }
