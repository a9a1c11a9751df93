"""Random ragged batches over a scattered, poisoned pool: what every attention backend is tested with.

A `Form` is what a program is compiled for; a case fills it. All that no token may see is NaN: other blocks, slots past
a context, queries of padding. Entries of block_tables past a context are no block's id.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxvllm.kernels import kv_cache, paged_attention, reference
from jaxvllm.kernels.paged_attention import AttentionBatch

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}  # of the greatest answer, or of 1


@dataclass(frozen=True, kw_only=True)
class Form:
    """The static half of a batch."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    max_tokens: int = 48  # T
    max_seqs: int = 6  # S
    max_blocks: int = 12  # M
    dtype: str = "float32"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    @property
    def num_blocks(self) -> int:
        return self.max_seqs * self.max_blocks + 2  # whatever the lengths, some blocks are nobody's

    @property
    def options(self) -> dict:
        return {
            "scale": self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch: `q` [T, N, H] and `pool` hold NaN wherever nothing may be read."""

    form: Form
    q: jax.Array
    pool: jax.Array
    batch: AttentionBatch
    decode_only: bool

    @property
    def arguments(self) -> tuple:
        """The positional arguments of `attend`."""
        return (self.q, self.pool, *self.batch[1:])

    def with_pool(self, pool: jax.Array) -> "Case":
        return replace(self, pool=pool)

    def reordered(self, order: Sequence[int]) -> "Case":
        """Returns the same sequences, `order[i]` in place i."""
        cu_seqlens = np.asarray(self.batch.cu_seqlens_q)
        rows = [row for s in order for row in range(cu_seqlens[s], cu_seqlens[s + 1])]
        rows += [row for row in range(len(self.q)) if row not in rows]
        lens = np.diff(cu_seqlens)
        order = [*order, *range(len(order), len(lens))]
        batch = AttentionBatch(
            slot_mapping=self.batch.slot_mapping[np.array(rows)],
            block_tables=self.batch.block_tables[np.array(order)],
            context_lens=self.batch.context_lens[np.array(order)],
            cu_seqlens_q=jnp.asarray(np.concatenate([[0], np.cumsum(lens[order])]), jnp.int32),
            num_seqs=self.batch.num_seqs,
        )
        return replace(self, q=self.q[np.array(rows)], batch=batch)

    def chunk(self, begin: int, end: int) -> "Case":
        """Returns the step that runs tokens `begin` to `end` of a prompt that is alone and whole in this batch."""
        T, n = len(self.q), end - begin
        padding = jnp.full((T - n, *self.q.shape[1:]), jnp.nan, self.q.dtype)
        batch = self.batch._replace(
            context_lens=self.batch.context_lens.at[0].set(end),
            cu_seqlens_q=jnp.minimum(self.batch.cu_seqlens_q, n),
        )
        return replace(self, q=jnp.concatenate([self.q[begin:end], padding]), batch=batch)


FORMS = {
    "small": Form(),
    "long": Form(block_size=16, max_tokens=160, max_seqs=5, max_blocks=24, head_dim=32),
    "one_kv_head_windowed": Form(num_heads=6, num_kv_heads=1, head_dim=64, sliding_window=5),
    "wide_window": Form(block_size=8, max_tokens=96, max_blocks=36, sliding_window=130, logits_soft_cap=3.0),
    "no_groups_bfloat16": Form(num_heads=3, num_kv_heads=3, head_dim=24, block_size=8, dtype="bfloat16"),
    "large_heads_bfloat16": Form(
        num_heads=4, num_kv_heads=2, head_dim=128, block_size=16, max_tokens=80, max_blocks=10, dtype="bfloat16"
    ),
    "float16": Form(dtype="float16", sliding_window=20),
    "capped": Form(num_heads=8, num_kv_heads=2, head_dim=16, block_size=2, max_blocks=20, logits_soft_cap=2.0),
}


def make_case(
    form: Form,
    context_lens: Sequence[int],
    num_new: Sequence[int],
    *,
    backend: str,
    decode_only: bool = False,
    block_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> Case:
    """Builds the batch of these sequences: K and V normal, the rest NaN, blocks scattered or those of `block_ids`."""
    rng = np.random.default_rng(seed)
    S, T, P, H = form.max_seqs, form.max_seqs if decode_only else form.max_tokens, form.block_size, form.head_dim
    live = len(context_lens)
    assert live <= S
    assert sum(num_new) <= T
    assert max(context_lens, default=0) <= form.max_blocks * P
    assert all(new <= context for context, new in zip(context_lens, num_new, strict=True))

    shape = kv_cache.pool_shape(form.num_blocks, form.num_kv_heads, P, H, backend)
    Hp = shape[3] // 2
    pool = np.full(shape, np.nan, np.float32)
    tables = rng.integers(-(2**31), 2**31, (S, form.max_blocks), dtype=np.int32)
    free = iter(rng.permutation(form.num_blocks) if block_ids is None else block_ids)
    slots = np.full(T, form.num_blocks * P, np.int32)
    cu_seqlens = np.zeros(S + 1, np.int32)
    for s, (context, new) in enumerate(zip(context_lens, num_new, strict=True)):
        for i in range(math.ceil(context / P)):
            block, tokens = next(free), min(P, context - i * P)
            tables[s, i] = block
            rows = rng.normal(size=(form.num_kv_heads, tokens, 2, H))
            pool[block, :, :tokens] = np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, Hp - H))).reshape(-1, tokens, 2 * Hp)
        position = np.arange(context - new, context)
        slots[cu_seqlens[s] : cu_seqlens[s] + new] = tables[s, position // P] * P + position % P
        cu_seqlens[s + 1 :] = cu_seqlens[s] + new

    q = rng.normal(size=(T, form.num_heads, H))
    q[cu_seqlens[-1] :] = np.nan
    batch = AttentionBatch(
        slot_mapping=jnp.asarray(slots),
        block_tables=jnp.asarray(tables),
        context_lens=jnp.asarray(np.pad(np.asarray(context_lens, np.int32), (0, S - live))),
        cu_seqlens_q=jnp.asarray(cu_seqlens),
        num_seqs=jnp.asarray([live], jnp.int32),
    )
    dtype = jnp.dtype(form.dtype)
    return Case(form=form, q=jnp.asarray(q, dtype), pool=jnp.asarray(pool, dtype), batch=batch, decode_only=decode_only)


@st.composite
def cases(draw: st.DrawFn, form: Form, *, backend: str, decode_only: bool) -> Case:
    """Draws a batch: lengths around block boundaries and between; prompts, chunks, decode-like and empty rows."""
    longest = form.max_blocks * form.block_size
    boundary = st.builds(
        lambda blocks, beside: min(max(blocks * form.block_size + beside, 1), longest),
        st.integers(0, form.max_blocks),
        st.sampled_from([0, 1, -1]),
    )
    room = form.max_seqs if decode_only else form.max_tokens
    context_lens, num_new = [], []
    for _ in range(draw(st.integers(1, form.max_seqs))):
        context = draw(boundary | st.integers(1, longest))
        new = 1
        if not decode_only:
            new = min(draw(st.sampled_from([1, 0, context]) | st.integers(1, context)), room)
            if new == 0:
                context = draw(st.sampled_from([0, context]))
        room -= new
        context_lens.append(context)
        num_new.append(new)
    seed = draw(st.integers(0, 2**31))
    return make_case(form, context_lens, num_new, backend=backend, decode_only=decode_only, seed=seed)


def check(backend: str, case: Case, attend: Callable | None = None) -> jax.Array:
    """Asserts that the backend's answer (or that of `attend`, in its place) is the oracle's; returns it."""
    if attend is None:
        attend = functools.partial(_attend, backend=backend)
    answer = attend(*case.arguments, **case.form.options, decode_only=case.decode_only)
    assert answer.shape == case.q.shape
    assert answer.dtype == case.q.dtype
    want = _attend_reference(case.q.astype(jnp.float32), *case.arguments[1:], **case.form.options)
    num_rows = int(case.batch.cu_seqlens_q[-1])
    got, want = np.asarray(answer, np.float32), np.asarray(want)[:num_rows]
    assert not got[num_rows:].any(), "a row of padding is not zero"
    got = got[:num_rows]
    assert np.isfinite(got).all(), "something was read that no token may see"
    error = np.abs(got - want).max(initial=0) / max(1.0, np.abs(want).max(initial=0))
    assert error <= TOLERANCE[case.form.dtype], f"off by {error:.1e}"
    return answer


def check_write(backend: str, case: Case) -> jax.Array:
    """Asserts that the case's new tokens, written anew, land in their slots and nowhere else; returns the pool."""
    k, v = _new_tokens(case)
    pool = _write(case.pool, k, v, case.batch.slot_mapping, backend=backend)
    want = _write_reference(case.pool, k, v, case.batch.slot_mapping)
    _assert_same_bits(pool, want)
    return pool


def check_decode_step(backend: str, case: Case, step: Callable | None = None) -> jax.Array:
    """Asserts of a decode that its new tokens are written, nothing else is, and the answers see them; returns those.

    The new tokens' slots hold NaN before. `step` stands in the place of the backend's `write_and_attend`.
    """
    if step is None:
        step = functools.partial(_write_and_attend, backend=backend)
    form = case.form
    is_padding = case.batch.slot_mapping[:, None, None] == form.num_blocks * form.block_size
    k, v = (jnp.where(is_padding, jnp.nan, x) for x in _new_tokens(case))
    gone = jnp.full_like(k, jnp.nan)
    before = case.with_pool(_write_reference(case.pool, gone, gone, case.batch.slot_mapping))
    after = case.with_pool(_write_reference(case.pool, k, v, case.batch.slot_mapping))
    answer, pool = step(case.q, k, v, before.pool, case.batch, **form.options, decode_only=True)
    _assert_same_bits(pool, after.pool)
    return check(backend, after, lambda *_, **__: answer)


def _new_tokens(case: Case) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [T, K, H] for a case's tokens, the same ones each time."""
    rng = np.random.default_rng(1)
    shape = (case.batch.slot_mapping.shape[0], case.form.num_kv_heads, case.form.head_dim)
    k, v = (jnp.asarray(rng.normal(size=shape), case.pool.dtype) for _ in range(2))
    return k, v


def _assert_same_bits(got: jax.Array, want: jax.Array):
    bits = f"uint{8 * want.dtype.itemsize}"  # a NaN equals itself there
    np.testing.assert_array_equal(np.asarray(got).view(bits), np.asarray(want).view(bits))


STATIC = ("scale", "sliding_window", "logits_soft_cap", "decode_only")
_attend = jax.jit(paged_attention.attend, static_argnames=(*STATIC, "backend"))
_attend_reference = jax.jit(reference.attend, static_argnames=STATIC)
_write_and_attend = jax.jit(paged_attention.write_and_attend, static_argnames=(*STATIC, "backend"))
_write = jax.jit(paged_attention.write, static_argnames="backend")
_write_reference = jax.jit(reference.write)
