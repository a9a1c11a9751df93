"""Paged attention: the public op. Checks what it is given, then hands it to the backend's body.

The body of a backend is a module with `write` and `attend` as here, without `backend`; where it has tiles by chip they
take `chip`, and where it can write and attend in one go it has `write_and_attend_decode`. It is imported when first
used: the TPU's and the GPU's need parts of JAX that a machine without one may lack.

A backend is a string, since it is static in every program: "xla", "gpu", "tpu", or "tpu:v6e", the TPU's with the
tiles of that chip. Plain "tpu" takes tiles that fit every chip.

Under a mesh (`jax.set_mesh`) whose axis CHIP_AXIS has several chips, each takes its share of the KV heads and of the
query heads that go with them; a pool is then sharded on its axis 1.
"""

import importlib
import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels import kv_cache

_BODIES: dict[str, str] = {
    "xla": "jaxvllm.kernels.xla",
    "tpu": "jaxvllm.kernels.tpu.backend",
    "gpu": "jaxvllm.kernels.gpu.backend",
}
_BACKEND_OF_PLATFORM = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}
CHIP_AXIS = "chip"  # of a mesh
_HEADS, _WHOLE = PartitionSpec(None, CHIP_AXIS), PartitionSpec()
_POOL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


logger = logging.getLogger(__name__)


class AttentionForm(NamedTuple):
    """What decides whether a backend's kernels can take a model: its attention, and the chip."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # of the cache
    compute_capability: str | None = None  # of an NVIDIA GPU, as "9.0"
    device_kind: str | None = None  # as JAX names it, "TPU v6 lite"


class AttentionBatch(NamedTuple):
    """Where a step's tokens stand in the cache: what `write` and `attend` need beside q, k and v.

    Sequence s has the new tokens `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, its last of `context_lens[s]`.
    """

    slot_mapping: Int32[Array, " T"]  # padding: B * P, one past the last slot, which `write` drops
    block_tables: Int32[Array, "S M"]  # entries past the context may be anything
    context_lens: Int32[Array, " S"]  # padding: 0
    cu_seqlens_q: Int32[Array, " S+1"]  # padding repeats the last value
    num_seqs: Int32[Array, " 1"]  # sequences that are not padding


def resolve_backend(name: str, platform: str, form: AttentionForm | None = None) -> str:
    """Returns the backend of `name` ("auto" follows JAX's `platform`: "cpu", "tpu", "gpu", ...).

    Where the kernels of the platform cannot take `form`, "auto" is `xla`, and one line of the log says why. Raises
    ValueError where the backend asked for has no body, is made for another platform or cannot take `form`.
    """
    native = _BACKEND_OF_PLATFORM.get(platform, "xla")
    if name == "auto":
        reason = _why_unsupported(native, form) if native in _BODIES else None
        if reason is not None:
            logger.warning("attention_backend='auto' is 'xla' here: %s", reason)
        return _with_tiles(native, form) if native in _BODIES and reason is None else "xla"
    _require_body(name)
    if name != "xla" and name != native:
        raise ValueError(f"attention_backend={name!r} needs a {name.upper()}, this is {platform!r}: use 'auto'.")
    reason = _why_unsupported(name, form)
    if reason is not None:
        raise ValueError(f"attention_backend={name!r} cannot be used: {reason} Use 'auto' or 'xla'.")
    return _with_tiles(name, form)


def _with_tiles(backend: str, form: AttentionForm | None) -> str:
    """Adds the chip to a backend that has tiles for each."""
    if form is None or form.device_kind is None:
        return backend
    chip_of = getattr(_body(backend), "chip_of", None)
    chip = chip_of(form.device_kind) if chip_of is not None else None
    return backend if chip is None else f"{backend}:{chip}"


def _why_unsupported(backend: str, form: AttentionForm | None) -> str | None:
    """Returns what a backend's body says against `form`; None where it has nothing to say."""
    if form is None:
        return None
    say = getattr(_body(backend), "why_unsupported", None)
    return None if say is None else say(form)


def write(
    pool: Float[Array, "B K P two_Hp"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, " T"],
    *,
    backend: str,
) -> Float[Array, "B K P two_Hp"]:
    """Writes the new tokens' keys and values into their slots, in place where the pool is donated.

    A slot outside the pool is dropped. Raises ValueError on shapes or dtypes that do not fit the pool.
    """
    body = _body(backend)
    _check_new(pool, k, v, slot_mapping, backend)
    write_heads = _over_heads(body.write, pool.shape[1], (_HEADS, _HEADS, _HEADS, _WHOLE), _HEADS)
    return write_heads(pool, k, v, slot_mapping)


def attend(
    q: Float[Array, "T N H"],
    pool: Float[Array, "B K P two_Hp"],
    block_tables: Int32[Array, "S M"],
    context_lens: Int32[Array, " S"],
    cu_seqlens_q: Int32[Array, " S+1"],
    num_seqs: Int32[Array, " 1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    decode_only: bool = False,
    backend: str,
) -> Float[Array, "T N H"]:
    """Causal attention of each sequence's new tokens over its cached ones, theirs included; in q's dtype.

    Token i of n new ones stands at position `context_lens[s] - n + i` and sees the positions up to its own,
    with `sliding_window` w only the last w of them. `logits_soft_cap` c turns a score x into c * tanh(x / c).
    Softmax and sums are float32. Rows of padding, from `cu_seqlens_q[num_seqs]` on, come out as zeros.
    `decode_only` promises that T == S and that every sequence has one new token.

    What no token sees may hold NaN: slots past the context, blocks in no table. Entries of a table past the
    context may be any number.

    Raises ValueError, while tracing, on shapes, dtypes or options that do not fit together.
    """
    body = _body(backend)
    _check_batch(q, pool, block_tables, context_lens, cu_seqlens_q, num_seqs, decode_only, backend)
    _check_options(scale, sliding_window, logits_soft_cap)
    attend_heads = partial(
        body.attend,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        decode_only=decode_only,
        **_chip_option(backend),
    )
    specs = (_HEADS, _HEADS, _WHOLE, _WHOLE, _WHOLE, _WHOLE)
    attend_heads = _over_heads(attend_heads, pool.shape[1], specs, _HEADS)
    return attend_heads(q, pool, block_tables, context_lens, cu_seqlens_q, num_seqs)


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Float[Array, "B K P two_Hp"],
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    decode_only: bool = False,
    backend: str,
) -> tuple[Float[Array, "T N H"], Float[Array, "B K P two_Hp"]]:
    """What a layer does in a step: `write`, then `attend`, which say the rest. Returns the answers and the pool.

    With `decode_only` a token's slot must be that of its sequence's last position, as the table has it: a backend may
    then do both at once, and take the slot from there. The blocks that are written must have one owner each.
    """
    options = {"scale": scale, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
    sequences = batch.block_tables, batch.context_lens, batch.cu_seqlens_q, batch.num_seqs
    fused = getattr(_body(backend), "write_and_attend_decode", None) if decode_only else None
    if fused is None:
        pool = write(pool, k, v, batch.slot_mapping, backend=backend)
        return attend(q, pool, *sequences, **options, decode_only=decode_only, backend=backend), pool
    _check_new(pool, k, v, batch.slot_mapping, backend)
    _check_batch(q, pool, *sequences, decode_only, backend)
    _check_options(**options)
    specs = (_HEADS, _HEADS, _HEADS, _HEADS, _WHOLE, _WHOLE, _WHOLE)
    body = _over_heads(partial(fused, **options, **_chip_option(backend)), pool.shape[1], specs, (_HEADS, _HEADS))
    return body(q, k, v, pool, batch.block_tables, batch.context_lens, batch.num_seqs)


def _chip_option(backend: str) -> dict[str, str]:
    chip = backend.partition(":")[2]
    return {"chip": chip} if chip else {}


def _over_heads(
    body: Callable,
    num_kv_heads: int,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
) -> Callable:
    """Returns `body`, where the mesh has several chips run on each with its own heads."""
    mesh = jax.sharding.get_abstract_mesh()
    num_chips = dict(mesh.shape).get(CHIP_AXIS, 1)
    if num_chips == 1:
        return body
    if num_kv_heads % num_chips:
        raise ValueError(f"{num_kv_heads} KV heads cannot be shared out to {num_chips} chips: use a divisor of them.")
    # the kernels say nothing of how their outputs vary over the mesh, so that it cannot be checked
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _require_body(backend: str):
    if backend not in _BODIES:
        raise ValueError(
            f"attention_backend={backend!r} has no kernel in this version: use one of auto, {', '.join(_BODIES)}."
        )


def _body(backend: str) -> ModuleType:
    name = backend.partition(":")[0]
    _require_body(name)
    return importlib.import_module(_BODIES[name])


def _check_pool(pool: Array, head_dim: int, backend: str):
    if pool.ndim != 4 or pool.dtype not in _POOL_DTYPES:
        raise ValueError(f"the pool is {pool.dtype}{list(pool.shape)}: needs floats [B, K, P, 2*Hp].")
    room = 2 * kv_cache.padded_head_dim(head_dim, backend)
    if pool.shape[3] != room:
        raise ValueError(
            f"the pool's rows hold {pool.shape[3]} numbers: a key and a value of head_dim={head_dim} "
            f"take {room} on backend {backend!r}."
        )


def _check_new(pool: Array, k: Array, v: Array, slot_mapping: Array, backend: str):
    _check_pool(pool, k.shape[-1], backend)
    T, K = slot_mapping.shape[0], pool.shape[1]
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 3 or x.shape[:2] != (T, K) or x.shape != k.shape:
            raise ValueError(f"{name} is {x.shape}: needs [{T}, {K}, H], as slot_mapping and the pool have it.")
    _check_integers("slot_mapping", slot_mapping, (T,))


def _check_batch(
    q: Array,
    pool: Array,
    block_tables: Array,
    context_lens: Array,
    cu_seqlens_q: Array,
    num_seqs: Array,
    decode_only: bool,
    backend: str,
):
    if q.ndim != 3:
        raise ValueError(f"q is {q.shape}: needs [T, N, H].")
    T, N, H = q.shape
    _check_pool(pool, H, backend)
    if N % pool.shape[1] != 0:
        raise ValueError(f"{N} query heads are not a multiple of the pool's {pool.shape[1]} KV heads.")
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables is {block_tables.shape}: needs [S, M].")
    S = block_tables.shape[0]
    _check_integers("block_tables", block_tables, block_tables.shape)
    _check_integers("context_lens", context_lens, (S,))
    _check_integers("cu_seqlens_q", cu_seqlens_q, (S + 1,))
    _check_integers("num_seqs", num_seqs, (1,))
    if decode_only and T != S:
        raise ValueError(f"decode_only needs one token per sequence, but q has {T} tokens for {S} sequences.")


def _check_integers(name: str, x: Array, shape: tuple[int, ...]):
    if x.shape != shape or x.dtype != jnp.int32:
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: needs int32{list(shape)}.")


def _check_options(scale: float, sliding_window: int | None, logits_soft_cap: float | None):
    if not scale > 0:
        raise ValueError(f"scale={scale} is not positive: it is usually head_dim ** -0.5.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window} is below 1: a token sees itself. None is no window.")
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"logits_soft_cap={logits_soft_cap} is not positive: None is no cap.")
