"""Decode attention on the TPU: one new token per sequence, W sequences per step.

The work is one flat loop of steps. A step is (group of W sequences, chunk of up to C cached tokens of each): it
starts the copies of the next step's blocks, waits for its own, and folds them into an online softmax 256 tokens
at a time. So a group's first copies run under the products of the group before it, and the loop never drains.

A matrix unit takes keys as its weights and queries as its rows; loading the weights is what costs, a row is
nearly free. One KV head has only G rows, so the rows of several heads and sequences stand together, 16 in a
matrix; each head's keys multiply all 16, and every row keeps the scores of its own head. A small number of KV
heads is made up for by W, and sequences are taken longest first, so that a group's lengths are nearly equal.

A step may write its new tokens too. The tile of rows that one goes to is fetched in any case, with the sequence's
last chunk: the row is put in before the tile is used, and a copy of the tile is sent back to the pool. Nothing waits
for that until the place of the copy is needed again, two steps later: a block being written has one owner, so no other
sequence's copies meet it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels.tpu import arithmetic as tpu
from jaxvllm.kernels.tpu.tiles import DecodeTiles


def _decode_kernel(
    tables, lens, rows, num_groups, q_ref, new, pool, o_ref, written, kv_buf, q_rows, m_ref, l_ref, acc_ref, sems, back,
    *, tiles: DecodeTiles, M: int, G: int, split_heads: bool, scale: float, window: int | None, soft_cap: float | None,
):  # fmt: skip
    """Grid (head groups,). K and N are those of a group of heads, HL = max(Hp, 128).

    SMEM: tables [S * M], lens [S], rows [S] (each sequence's row in q and o), num_groups [1]; longest first.
    VMEM: q_ref, o_ref [S, N, HL]; kv_buf [2, W * C/P, K, P, 2Hp], the chunks of two steps; q_rows [W * N, HL].
    HBM: pool [B, K, P, 2Hp].
    Where new tokens are written, one each (else none): new [K, S, 2Hp] float32, their keys and values; written, the
    pool as output; back, tiles [2, W, K, 8 or 16, 2Hp] on their way back, and 2 semaphores.
    Carries m_ref, l_ref [W * N, 128] (equal lanes) and acc_ref [W * N, HL], float32; 2 semaphores.
    """
    _, _, K, P, _ = kv_buf.shape
    _, N, HL = q_ref.shape
    W, C, CC, grain = tiles.seqs, tiles.chunk, tiles.sub_chunk, tiles.grain
    row_group = tiles.row_group(G, N, kv_buf.dtype)
    heads = pl.ds(pl.program_id(0) * K, K) if split_heads else None
    pool = written[0] if written else pool  # the same memory
    product = tpu.products(kv_buf.dtype)

    def window_start(n):
        """The first block that a query at position n - 1 sees."""
        return 0 if window is None else tpu.quotient(jnp.maximum(n - window, 0), P)

    def span(g, c, w):
        """(tokens, first block of the chunk, tokens in the chunk) of a group's w-th sequence."""
        n = lens[g * W + w]
        base = window_start(n) + c * (C // P)
        return n, base, tpu.at_least_zero(n - base * P, C)

    def num_chunks(g):
        visible = [n - window_start(n) * P for n in (lens[g * W + w] for w in range(W))]
        return tpu.quotient(functools.reduce(jnp.maximum, visible, 1) + C - 1, C)

    def start(g, c, slot):
        for w in range(W):
            _, base, live = span(g, c, w)
            row, first = (g * W + w) * M + base, w * (C // P)
            tpu.start_blocks(tables, row, live, pool, kv_buf.at[slot], first, sems.at[slot], heads=heads, grain=grain)

    def fold(slot, lives, lows, boundary, i, _):
        """Folds tokens [i * CC, (i + 1) * CC) of every sequence in; `boundary`: some end among them."""
        owner = lax.broadcasted_iota(jnp.int32, (row_group, tpu.LANES), 0)
        owner = tpu.quotient(owner, G)
        column = i * CC + lax.broadcasted_iota(jnp.int32, (row_group, CC), 1)

        def own(values):
            """Of each unit's [row_group, n], the rows that belong to it."""
            out = values[0]
            for u, x in enumerate(values[1:], 1):
                out = jnp.where(tpu.equal_lanes(owner, out.shape[1]) == u, x, out)
            return out

        def of_rows(scalars, seqs):
            if len(set(seqs)) == 1:
                return scalars[seqs[0]]
            return own([jnp.full((row_group, CC), scalars[w]) for w in seqs])

        def load(w, h):
            blocks = pl.ds(w * (C // P) + i * (CC // P), CC // P)
            k, v = tpu.load_kv(kv_buf.at[slot], blocks, h, HL)
            return k, tpu.clear_rows(v, lives[w] - i * CC) if boundary else v

        for first_row in range(0, W * N, row_group):
            at = pl.ds(first_row, row_group)
            units = [divmod(u, K) for u in range(first_row // G, (first_row + row_group) // G)]
            kv = [load(w, h) for w, h in units]
            q = q_rows[at]
            scores = own([product(q, k, transposed=True) for k, _ in kv])
            scores = tpu.base2_scores(scores, scale, soft_cap)
            if boundary or window is not None:
                seqs = [w for w, _ in units]
                visible = column < of_rows(lives, seqs)
                if window is not None:
                    visible &= column >= of_rows(lows, seqs)
                scores = jnp.where(visible, scores, tpu.MASKED)
            weights, shrink = tpu.softmax_step(scores, m_ref.at[at])
            l_ref[at] = shrink * l_ref[at] + jnp.sum(weights, axis=1, keepdims=True)
            weights = weights.astype(kv_buf.dtype)
            acc_ref[at] = tpu.equal_lanes(shrink, HL) * acc_ref[at] + own([product(weights, v) for _, v in kv])

    def put_new(g, slot, spans):
        """Puts in the new token, its sequence's last, where it is in this chunk; returns how many tiles are sent."""
        (tiles_sent, sent_sems), count = back, 0
        for w, (n, base, live) in enumerate(spans):
            place = n - 1 - base * P
            is_here = (live > 0) & (place < C)

            @pl.when(is_here)
            def _(w=w, base=base, place=place):
                row, block, copy = g * W + w, tpu.quotient(place, P), tiles_sent.at[slot, w]
                tile = _put_token(kv_buf.at[slot, w * (C // P) + block], place, new[0], rows[row], copy)
                home = pool.at[tables[row * M + base + block], pl.ds(0, K) if heads is None else heads, tile]
                pltpu.make_async_copy(copy, home, sent_sems.at[slot]).start()

            count += is_here.astype(jnp.int32)
        return count

    def begin(g):
        q_rows[...] = jnp.concatenate([q_ref[rows[g * W + w]] for w in range(W)])
        m_ref[...] = jnp.full_like(m_ref, tpu.MASKED)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def finish(g):
        total = l_ref[...]
        inverse = jnp.where(total > 0, tpu.reciprocal(total), 0)  # an empty sequence has no weights
        out = (acc_ref[...] * tpu.equal_lanes(inverse, HL)).astype(o_ref.dtype)
        for w in range(W):
            o_ref[rows[g * W + w]] = out[w * N : (w + 1) * N]

    def step(state):
        g, c, slot, chunks, sent, sent_before = state
        last = c + 1 >= chunks
        next_g, next_c = jnp.where(last, g + 1, g), jnp.where(last, 0, c + 1)
        pl.when(next_g < num_groups[0])(lambda: start(next_g, next_c, 1 - slot))
        pl.when(c == 0)(lambda: begin(g))

        spans = [span(g, c, w) for w in range(W)]
        lives = [live for _, _, live in spans]
        lows = [None if window is None else n - window - base * P for n, base, _ in spans]
        size = functools.reduce(jnp.add, [tpu.round_up(live, grain) for live in lives])
        tpu.wait_blocks(size, kv_buf.at[slot], sems.at[slot], grain=grain)
        if written:
            _wait_sent(back, slot, sent_before)
            sent, sent_before = put_new(g, slot, spans), sent
        inside = tpu.quotient(functools.reduce(jnp.minimum, lives), CC)
        end = tpu.quotient(functools.reduce(jnp.maximum, lives) + CC - 1, CC)
        lax.fori_loop(0, inside, functools.partial(fold, slot, lives, lows, False), None)
        lax.fori_loop(inside, end, functools.partial(fold, slot, lives, lows, True), None)

        pl.when(last)(lambda: finish(g))
        after = jnp.minimum(next_g, num_groups[0] - 1)
        return next_g, next_c, 1 - slot, num_chunks(after), sent, sent_before

    o_ref[...] = jnp.zeros_like(o_ref)  # rows of padding

    @pl.when(num_groups[0] > 0)
    def _():
        start(0, 0, 0)
        state = (0, 0, 0, num_chunks(0), 0, 0)
        _, _, slot, _, sent, sent_before = lax.while_loop(lambda state: state[0] < num_groups[0], step, state)
        if written:
            _wait_sent(back, slot, sent_before)
            _wait_sent(back, 1 - slot, sent)


def _put_token(block, place, new_ref, row, copy):
    """Puts a row of new_ref [K, S, 2Hp] at `place` of its chunk into its block [K, P, 2Hp].

    Copies the tile of rows around it to `copy` [K, 8 or 16, 2Hp]; returns where in the block that is.
    """
    K, tile_rows, width = copy.shape
    tile = pl.ds(pl.multiple_of(place & (block.shape[1] - tile_rows), tile_rows), tile_rows)
    is_new = lax.broadcasted_iota(jnp.int32, (tile_rows, width), 0) == (place & (tile_rows - 1))
    for h in range(K):
        token = jnp.broadcast_to(new_ref[h, pl.ds(row, 1)], (tile_rows, width)).astype(block.dtype)
        block[h, tile] = copy[h] = jnp.where(is_new, token, block[h, tile])
    return tile


def _wait_sent(back, slot, count):
    """Waits for `count` tiles of a slot: a wait counts bytes, whichever they are."""
    tiles_sent, sent_sems = back
    some = tiles_sent.at[slot, pl.ds(0, count)]
    pl.when(count > 0)(lambda: pltpu.make_async_copy(some, some, sent_sems.at[slot]).wait())


def attend_decode(
    q: Float[Array, "S N HL"],
    new: Float[Array, "S K two_Hp"] | None,
    pool: Float[Array, "B K P two_Hp"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    *,
    tiles: DecodeTiles,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
) -> tuple[Float[Array, "S N HL"], Float[Array, "B K P two_Hp"]]:
    """Attention of one new token per sequence; context_lens 0 is an empty row. S is a multiple of tiles.seqs.

    `new`, where given, are the new tokens' keys and values, which are not in the pool yet: they are put there, in place
    where the pool is donated. Returns the answers and the pool.
    """
    S, N, HL = q.shape
    B, K, P, two_hp = pool.shape
    M = block_tables.shape[1]
    W, cores = tiles.seqs, tiles.head_groups
    # the same for every layer: XLA sorts once
    order = jnp.arange(S, dtype=jnp.int32) if W == 1 else jnp.argsort(-context_lens).astype(jnp.int32)
    lens = context_lens[order]
    tables = jnp.clip(block_tables, 0, B - 1)[order].reshape(-1)  # a wild id must not become a wild address
    used = jnp.max(jnp.where(lens > 0, jnp.arange(1, S + 1), 0), keepdims=True)
    num_groups = ((used + W - 1) // W).astype(jnp.int32)

    kernel = functools.partial(
        _decode_kernel, tiles=tiles, M=M, G=N // K, split_heads=cores > 1, scale=scale, window=sliding_window,
        soft_cap=logits_soft_cap,
    )  # fmt: skip
    rows = W * N // cores
    whole = pl.BlockSpec((S, N // cores, HL), lambda h, *_: (0, h, 0))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    write, sublanes = new is not None, 32 // pool.dtype.itemsize
    # a row at any place can be loaded only where rows have 32 bits
    new_rows = [] if new is None else [new.astype(jnp.float32).swapaxes(0, 1)]
    sent_tiles = pltpu.VMEM((2, W, K // cores, sublanes, two_hp), pool.dtype)
    out, written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores,),
            in_specs=[whole, [pl.BlockSpec((K // cores, S, two_hp), lambda h, *_: (h, 0, 0))] * write, hbm],
            out_specs=[whole, [hbm] * write],
            scratch_shapes=[
                pltpu.VMEM((2, W * tiles.chunk // P, K // cores, P, two_hp), pool.dtype),
                pltpu.VMEM((rows, HL), q.dtype),
                pltpu.VMEM((rows, tpu.LANES), jnp.float32),
                pltpu.VMEM((rows, tpu.LANES), jnp.float32),
                pltpu.VMEM((rows, HL), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                [sent_tiles, pltpu.SemaphoreType.DMA((2,))] * write,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((S, N, HL), q.dtype), [pltpu.HBM(pool.shape, pool.dtype)] * write],
        input_output_aliases={6: 1} if write else {},
        # block ids are clipped above, all else follows from shapes: the checks are half the cost of a copy's start
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=tiles.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        name="paged_decode",
    )(tables, lens, order, num_groups, q, new_rows, pltpu.with_memory_space_constraint(pool, pltpu.HBM))
    return out, written[0] if write else pool
