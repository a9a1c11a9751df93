"""The KV cache of one layer: one array `[B, K, P, 2*Hp]`, block, KV head, token, its key then its value.

A block of a head is one contiguous piece of memory, whatever the number of heads, and the array shards on
axis 1. `Hp` is the head size padded to what the tiles of a backend want. A layer has its own array: a slice
of a bigger array handed to a kernel would become a copy.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_SMALLEST_TILED_HEAD = 64  # a key of 64 and its value share one row of 128 lanes
_LANES = 128


def padded_head_dim(head_dim: int, backend: str) -> int:
    """Returns `Hp`, the room for a key (or value) in the pool: `head_dim` for `xla`, else 64 or n * 128."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim} is not a positive number.")
    if backend == "xla":
        return head_dim
    if backend.partition(":")[0] not in ("tpu", "gpu"):
        raise ValueError(f"backend={backend!r} is none of xla, tpu, gpu.")
    if head_dim <= _SMALLEST_TILED_HEAD:
        return _SMALLEST_TILED_HEAD
    return -(-head_dim // _LANES) * _LANES


def pool_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, backend: str
) -> tuple[int, int, int, int]:
    """Returns `(B, K, P, 2*Hp)`, the shape of one layer's pool."""
    for name, value in (
        ("num_blocks", num_blocks),
        ("num_kv_heads", num_kv_heads),
        ("block_size", block_size),
    ):
        if value < 1:
            raise ValueError(f"{name}={value} is not a positive number.")
    if num_blocks * block_size >= 2**31:
        raise ValueError(
            f"num_blocks={num_blocks} of block_size={block_size} tokens are more slots than int32 "
            "can number: lower num_kvcache_blocks."
        )
    return (num_blocks, num_kv_heads, block_size, 2 * padded_head_dim(head_dim, backend))


def allocate(
    num_layers: int,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    sharding: jax.sharding.Sharding | None = None,
) -> list[Float[Array, "B K P two_Hp"]]:
    """Returns one pool of zeros per layer, each an array of its own, made in place on its devices."""
    return [jnp.zeros(shape, dtype, device=sharding) for _ in range(num_layers)]


def write(
    pool: Float[Array, "B K P two_Hp"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
) -> Float[Array, "B K P two_Hp"]:
    """Writes each token's key and value into its slot; a slot outside the pool is dropped, below zero too.

    In place where the pool is donated. Indexed by block and offset: one flat index would overflow int32.
    """
    P, Hp = pool.shape[2], pool.shape[3] // 2
    block, offset = slot_mapping // P, slot_mapping % P
    # one half, then the other: rows of both at once would be a copy of k and v
    for lanes, new in ((slice(0, Hp), k), (slice(Hp, None), v)):
        new = jnp.pad(new, ((0, 0), (0, 0), (0, Hp - new.shape[2]))).astype(pool.dtype)
        # a negative index would count from the end, and a padding token overwrite a live block
        pool = pool.at[block, :, offset, lanes].set(new, mode="drop", wrap_negative_indices=False)
    return pool


def read(
    pool: Float[Array, "B K P two_Hp"], block_table: Int32[Array, " M"], num_tokens: int, head_dim: int
) -> tuple[Float[Array, "t K H"], Float[Array, "t K H"]]:
    """Returns the keys and values of one sequence's first `num_tokens` tokens, in token order."""
    _, K, P, two_hp = pool.shape
    num_blocks = -(-num_tokens // P)
    if num_tokens < 0 or num_blocks > block_table.shape[0]:
        raise ValueError(
            f"num_tokens={num_tokens} is not within the {block_table.shape[0]} blocks of {P} tokens given."
        )
    rows = pool[block_table[:num_blocks]].swapaxes(1, 2).reshape(num_blocks * P, K, two_hp)[:num_tokens]
    return rows[..., :head_dim], rows[..., two_hp // 2 :][..., :head_dim]
