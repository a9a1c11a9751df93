"""Batches of sequences for the checks on a GPU, made on the device: what to attend to, its bytes and operations."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jaxvllm.kernels import kv_cache


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step's attention of one layer: a model's heads and the sequences' lengths."""

    context_lens: tuple[int, ...]  # tokens, this step's included
    num_new: tuple[int, ...] = ()  # tokens of this step; () is a decode, one each
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    @property
    def decode_only(self) -> bool:
        return not self.num_new

    @property
    def news(self) -> tuple[int, ...]:
        return self.num_new or (1,) * len(self.context_lens)

    @property
    def max_blocks(self) -> int:
        """M."""
        return -(-max(self.context_lens) // self.block_size)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attend`."""
        return {
            "scale": self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
            "decode_only": self.decode_only,
        }

    @property
    def num_bytes(self) -> int:
        """The least a step can move: each live key and value once, queries and answers."""
        kv = 2 * sum(self.context_lens) * self.num_kv_heads * self.head_dim
        io = 2 * sum(self.news) * self.num_heads * self.head_dim
        return (kv + io) * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Operations of the two products over the pairs of tokens that see each other, without a window."""
        pairs = sum(new * context - new * (new - 1) // 2 for context, new in self.pairs)
        return 4 * pairs * self.num_heads * self.head_dim

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(context length, new tokens) of each sequence."""
        return list(zip(self.context_lens, self.news, strict=True))


class Batches(NamedTuple):
    """R batches of a workload: the same lengths in another order, in other blocks of one pool."""

    q: Float[Array, "T N H"]
    pool: Float[Array, "B K P two_Hp"]
    tables: Int32[Array, "R S M"]
    lens: Int32[Array, "R S"]
    cu_seqlens: Int32[Array, "R S_plus_1"]
    num_seqs: Int32[Array, " 1"]

    def arguments(self, i) -> tuple:
        """The positional arguments of `attend` for call i, after q and the pool."""
        r = i % self.tables.shape[0]
        return self.tables[r], self.lens[r], self.cu_seqlens[r], self.num_seqs


def make_batches(
    workload: Workload, *, backend: str, copies: int = 1, poison: bool = False, spare_rows: int = 0, seed: int = 0
) -> Batches:
    """Makes `copies` batches over blocks in random order; queries, keys and values are normal.

    With `poison`, all that no token may look at is NaN: slots past a context, blocks of nobody, queries of padding;
    and a table's entries past a context are no block's id. `spare_rows` are tokens and sequences of padding.
    """
    w, rng = workload, np.random.default_rng(seed)
    live_seqs, M, P = len(w.context_lens), w.max_blocks, w.block_size
    S = live_seqs + spare_rows
    blocks_each = [-(-n // P) for n in w.context_lens]
    B = copies * sum(blocks_each) + 2  # two are nobody's
    order = iter(rng.permutation(B))
    wrong = rng.integers(-(2**31), 2**31, (copies, S, M), dtype=np.int64).astype(np.int32)
    tables = wrong if poison else np.zeros((copies, S, M), np.int32)
    lens, cu = np.zeros((copies, S), np.int32), np.zeros((copies, S + 1), np.int32)
    live = np.zeros(B, np.int32)  # live tokens of each block
    for r in range(copies):
        for row, s in enumerate(rng.permutation(live_seqs)):
            context, new = w.pairs[s]
            lens[r, row], cu[r, row + 1 :] = context, cu[r, row] + new
            for m in range(blocks_each[s]):
                tables[r, row, m] = block = next(order)
                live[block] = min(P, context - m * P)

    dtype = jnp.dtype(w.dtype)
    shape = kv_cache.pool_shape(B, w.num_kv_heads, P, w.head_dim, backend)
    q_key, pool_key = jax.random.split(jax.random.key(seed))
    pool = _make_pool(pool_key, jnp.asarray(live), shape=shape, dtype=dtype, head_dim=w.head_dim, poison=poison)
    q = jax.random.normal(q_key, (sum(w.news) + spare_rows, w.num_heads, w.head_dim), dtype)
    if poison and spare_rows:
        q = q.at[-spare_rows:].set(jnp.nan)
    num_seqs = jnp.array([live_seqs], jnp.int32)
    return Batches(q, pool, jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(cu), num_seqs)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "head_dim", "poison"))
def _make_pool(
    key, live: Int32[Array, " B"], *, shape: tuple[int, ...], dtype: Any, head_dim: int, poison: bool
) -> Float[Array, "B K P two_Hp"]:
    """Fills a pool block by block, in the layout [key, padding, value, padding] of each token."""
    padded = shape[3] // 2
    is_padding: Bool[Array, " two_Hp"] = jnp.arange(shape[3]) % padded >= head_dim

    def make_block(numbered):
        i, num_live = numbered
        rows = jax.random.normal(jax.random.fold_in(key, i), shape[1:], dtype)
        rows = jnp.where(is_padding, 0, rows)
        if poison:
            rows = jnp.where((jnp.arange(shape[2]) < num_live)[:, None], rows, jnp.nan)
        return rows.astype(dtype)

    return jax.lax.map(make_block, (jnp.arange(shape[0]), live), batch_size=min(64, shape[0]))
