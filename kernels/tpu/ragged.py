"""Ragged paged attention on the TPU: any number of new tokens per sequence, over a cached prefix or none.

The work is one flat loop of steps. A step is (sequence, tile of its new tokens, chunk of its cached tokens): it
starts the copies of the next step's blocks and queries, waits for its own, and folds the chunk into the online
softmax of the tile. A tile has `queries` new tokens, or, where no more than `few` are left (a decode among
prefills, a handful of drafted tokens), only `few`: the two heights are two bodies of the same code.

Queries come token by token, all heads together, and a matrix product wants the rows of one KV head: `_begin_tile`
turns [tokens, some heads] into [some heads, tokens], `_finish_tile` turns the answer back. Only chunks on the
diagonal, at the window's edge or at the context's end take the body with masks, a sub-chunk at a time, so that
little is multiplied which nobody sees.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels.tpu import arithmetic as tpu
from jaxvllm.kernels.tpu.tiles import RaggedTiles

_UNROLLED_HEADS = 4  # KV heads whose small products run side by side


def _ragged_kernel(
    tables, lens, cu, num_seqs, q_hbm, pool, _, o_hbm,
    kv_buf, q_buf, o_buf, q_rows, m_ref, l_ref, acc_ref, o_pending, kv_sem, q_sem, o_sem,
    *, tiles: RaggedTiles, M: int, G: int, split_heads: bool, scale: float, window: int | None, soft_cap: float | None,
):  # fmt: skip
    """Grid (head groups,). K and N are those of a group of heads, HL = max(Hp, 128), Q = tiles.queries.

    SMEM: tables [S * M], lens [S], cu [S + 1], num_seqs [1]; o_pending [2], rows of the answer under way.
    HBM: q_hbm, o_hbm [T, N, HL], pool [B, K, P, 2Hp]. o_hbm comes zeroed, rows of padding stay so.
    VMEM: kv_buf [2, C/P, K, P, 2Hp], q_buf, o_buf [2, Q, N, HL], the tiles and chunks of two steps;
    q_rows [K, G * Q, HL], its row g * height + t is query t of head g.
    Carries m_ref, l_ref [K, G * Q, 128] (equal lanes) and acc_ref [K, G * Q, HL], float32. 2 semaphores each.
    """
    _, CB, K, P, _ = kv_buf.shape
    _, Q, N, HL = q_buf.shape
    C, CC, grain = CB * P, tiles.sub_chunk, tiles.grain
    split = pl.program_id(0) if split_heads else 0
    heads, q_heads = (pl.ds(split * K, K), pl.ds(split * N, N)) if split_heads else (None, pl.ds(0, N))
    product = tpu.products(kv_buf.dtype)

    def tile_of(s, t):
        """(its first row in q, rows, position of the first, first block it sees)."""
        begin, new = cu[s], cu[s + 1] - cu[s]
        first = lens[s] - new + t * Q
        low = 0 if window is None else tpu.quotient(jnp.maximum(first - window + 1, 0), P)
        return begin + t * Q, tpu.at_least_zero(new - t * Q, Q), first, low

    def chunk_of(s, t, c):
        """(its first block, tokens of it that some row of the tile sees)."""
        _, rows, first, low = tile_of(s, t)
        base = low + c * CB
        return base, jnp.where(rows > 0, tpu.at_least_zero(first + rows - base * P, C), 0)

    def advance(s, t, c):
        _, rows, first, low = tile_of(s, t)
        same_tile = (rows > 0) & (first + rows - low * P > (c + 1) * C)
        same_seq = same_tile | ((t + 1) * Q < cu[s + 1] - cu[s])
        next_t = jnp.where(same_tile, t, jnp.where(same_seq, t + 1, 0))
        return jnp.where(same_seq, s, s + 1), next_t, jnp.where(same_tile, c + 1, 0)

    def start_kv(s, t, c, slot):
        base, live = chunk_of(s, t, c)
        tpu.start_blocks(
            tables, s * M + base, live, pool, kv_buf.at[slot], 0, kv_sem.at[slot], heads=heads, grain=grain
        )

    def q_copy(s, t, slot, act):
        row, rows, _, _ = tile_of(s, t)
        source, target = q_hbm.at[pl.ds(row, rows), q_heads], q_buf.at[slot, pl.ds(0, rows)]
        pl.when(rows > 0)(lambda: act(pltpu.make_async_copy(source, target, q_sem.at[slot])))

    def o_copy(row, rows, slot, act):
        source, target = o_buf.at[slot, pl.ds(0, rows)], o_hbm.at[pl.ds(row, rows), q_heads]
        pl.when(rows > 0)(lambda: act(pltpu.make_async_copy(source, target, o_sem.at[slot])))

    def fold(slot, first, base, live, height, parts, masked, j, unit, _):
        """Folds a whole chunk of a head into one of `parts` equal parts of the tile's rows, unit = head * parts + part.

        Where `masked`, the chunk's j-th sub-chunk.
        """
        size, rows = CC if masked else C, height * G // parts
        h, first_row = tpu.quotient(unit, parts), pl.multiple_of((unit & (parts - 1)) * rows, rows)
        k, v = tpu.load_kv(kv_buf.at[slot], pl.ds(j * (size // P), size // P), h, HL)
        v = tpu.clear_rows(v, live - j * size) if masked else v
        at = h, pl.ds(first_row, rows)
        scores = tpu.base2_scores(product(q_rows[at], k, transposed=True), scale, soft_cap)
        if masked:
            row, column = (lax.broadcasted_iota(jnp.int32, (rows, size), axis) for axis in (0, 1))
            ahead = first + ((first_row + row) & (height - 1)) - base * P - j * size - column
            visible = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
            scores = jnp.where(visible, scores, tpu.MASKED)
        weights, shrink = tpu.softmax_step(scores, m_ref.at[at])
        if tiles.sums_in_product:
            v = jnp.concatenate([v, jnp.ones_like(v)], axis=1)
        summed = product(weights.astype(v.dtype), v)
        total = summed[:, HL:] if tiles.sums_in_product else jnp.sum(weights, axis=1, keepdims=True)
        l_ref[at] = shrink * l_ref[at] + total
        acc_ref[at] = tpu.equal_lanes(shrink, HL) * acc_ref[at] + summed[:, :HL]

    def step(state):
        s, t, c, kv_slot, q_slot = state
        row, rows, first, _low = tile_of(s, t)
        base, live = chunk_of(s, t, c)
        next_s, next_t, next_c = advance(s, t, c)
        last = next_c == 0  # the next step has another tile
        next_q_slot = jnp.where(last, 1 - q_slot, q_slot)

        @pl.when(next_s < num_seqs[0])
        def _():
            start_kv(next_s, next_t, next_c, 1 - kv_slot)
            pl.when(last)(lambda: q_copy(next_s, next_t, next_q_slot, lambda copy: copy.start()))

        def at_height(body):
            pl.when((rows > 0) & (rows <= tiles.few))(lambda: body(tiles.few))
            if tiles.few < Q:
                pl.when(rows > tiles.few)(lambda: body(Q))

        @pl.when(c == 0)
        def _():
            q_copy(s, t, q_slot, lambda copy: copy.wait())
            at_height(lambda height: _begin_tile(q_buf.at[q_slot], q_rows, m_ref, l_ref, acc_ref, height, G))

        tpu.wait_blocks(tpu.round_up(live, grain), kv_buf.at[kv_slot], kv_sem.at[kv_slot], grain=grain)
        inside = base * P + C - 1 <= first  # every row sees every token of the chunk
        if window is not None:
            inside &= base * P > first + rows - 1 - window

        def fold_chunk(height):
            def heads_of(masked, unroll, parts, j, _):
                body = functools.partial(fold, kv_slot, first, base, live, height, parts, masked, j)
                lax.fori_loop(0, K * parts, body, None, unroll=min(K * parts, unroll))

            def edges(unroll):
                lax.fori_loop(0, tpu.quotient(live + CC - 1, CC), functools.partial(heads_of, True, unroll, 1), None)

            if height == tiles.few:  # bound by the copies: one body is enough
                edges(_UNROLLED_HEADS)
            else:
                parts = tiles.parts_of_rows(K, height * G)
                pl.when(inside)(lambda: heads_of(False, tiles.heads_at_once, parts, 0, None))
                pl.when(jnp.logical_not(inside))(lambda: edges(1))

        at_height(fold_chunk)

        @pl.when(last & (rows > 0))
        def _():
            o_copy(0, o_pending[q_slot], q_slot, lambda copy: copy.wait())  # the tile before last has left
            at_height(lambda height: _finish_tile(l_ref, acc_ref, o_buf.at[q_slot], height, G))
            o_pending[q_slot] = rows
            o_copy(row, rows, q_slot, lambda copy: copy.start())

        return next_s, next_t, next_c, 1 - kv_slot, next_q_slot

    o_pending[0] = o_pending[1] = 0

    @pl.when(num_seqs[0] > 0)
    def _():
        start_kv(0, 0, 0, 0)
        q_copy(0, 0, 0, lambda copy: copy.start())
        lax.while_loop(lambda state: state[0] < num_seqs[0], step, (0, 0, 0, 0, 0))
        for slot in range(2):
            o_copy(0, o_pending[slot], slot, lambda copy: copy.wait())


def _rows_of(n, height: int, G: int):
    """Where the `height` rows of query head n stand: its KV head, and its rows there."""
    return tpu.quotient(n, G), pl.ds(pl.multiple_of((n & (G - 1)) * height, height), height)


def _each_turn(N: int, dtype, turn):
    """Calls `turn(first head, heads)` for groups of query heads that fill whole tiles of sublanes."""
    count = min(N, 32 // jnp.dtype(dtype).itemsize)
    lax.fori_loop(0, N // count, lambda j, _: turn(pl.multiple_of(j * count, count), count), None)


def _begin_tile(q_buf, q_rows, m_ref, l_ref, acc_ref, height: int, G: int):
    """Turns `height` tokens of q_buf [Q, N, HL] into rows of q_rows [K, G * Q, HL], and clears the softmax."""

    def turn(first, count):
        x = jnp.swapaxes(q_buf[pl.ds(0, height), pl.ds(first, count)].astype(jnp.float32), 0, 1)
        for i in range(count):
            q_rows[_rows_of(first + i, height, G)] = x[i].astype(q_rows.dtype)

    def clear(h, _):
        at = h, pl.ds(0, height * G)
        m_ref[at] = jnp.full((height * G, tpu.LANES), tpu.MASKED, jnp.float32)
        l_ref[at] = jnp.zeros((height * G, tpu.LANES), jnp.float32)
        acc_ref[at] = jnp.zeros((height * G, acc_ref.shape[2]), jnp.float32)

    _each_turn(q_buf.shape[1], q_buf.dtype, turn)
    lax.fori_loop(0, q_rows.shape[0], clear, None)


def _finish_tile(l_ref, acc_ref, o_buf, height: int, G: int):
    """Divides by the sums of weights and turns the rows back into `height` tokens of o_buf [Q, N, HL]."""

    def turn(first, count):
        at = [_rows_of(first + i, height, G) for i in range(count)]
        x = jnp.stack([acc_ref[a] * tpu.equal_lanes(tpu.reciprocal(l_ref[a]), acc_ref.shape[2]) for a in at])
        o_buf[pl.ds(0, height), pl.ds(first, count)] = jnp.swapaxes(x, 0, 1).astype(o_buf.dtype)

    _each_turn(o_buf.shape[1], o_buf.dtype, turn)


def attend_ragged(
    q: Float[Array, "T N HL"],
    pool: Float[Array, "B K P two_Hp"],
    out: Float[Array, "T N HL"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    cu_seqlens_q: Int32[Array, " S+1"],
    num_seqs: Int32[Array, " 1"],
    *,
    tiles: RaggedTiles,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
) -> Float[Array, "T N HL"]:
    """Returns `out` with the rows of these sequences filled in; `out` is given away."""
    T, N, HL = q.shape
    B, K, P, two_hp = pool.shape
    groups, Q, C = tiles.head_groups, tiles.queries, tiles.chunk
    tables = jnp.clip(block_tables, 0, B - 1).reshape(-1)  # a wild id must not become a wild address
    kernel = functools.partial(
        _ragged_kernel, tiles=tiles, M=block_tables.shape[1], G=N // K, split_heads=groups > 1, scale=scale,
        window=sliding_window, soft_cap=logits_soft_cap,
    )  # fmt: skip
    kg, ng, rows = K // groups, N // groups, Q * (N // K)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # XLA may put small operands into VMEM, where a copy becomes a loop of vector moves
    pinned = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (q, pool, out)]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(groups,),
            in_specs=[hbm] * 3,
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((2, C // P, kg, P, two_hp), pool.dtype),
                pltpu.VMEM((2, Q, ng, HL), q.dtype),
                pltpu.VMEM((2, Q, ng, HL), q.dtype),
                pltpu.VMEM((kg, rows, HL), q.dtype),
                pltpu.VMEM((kg, rows, tpu.LANES), jnp.float32),
                pltpu.VMEM((kg, rows, tpu.LANES), jnp.float32),
                pltpu.VMEM((kg, rows, HL), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
            ],
        ),
        out_shape=pltpu.HBM((T, N, HL), q.dtype),
        input_output_aliases={6: 0},
        # block ids are clipped above, all else follows from shapes: the checks are half the cost of a copy's start
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=tiles.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        name="paged_ragged",
    )(tables, context_lens, cu_seqlens_q, num_seqs, *pinned)
