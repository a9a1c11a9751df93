"""Combines what the workers of the decode kernel leave of each sequence into its answer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from jaxvllm.kernels.gpu import common as gpu
from jaxvllm.kernels.gpu.common import MASKED, NO_MAXIMUM, WGMMA
from jaxvllm.kernels.gpu.decode_plan import DecodePlan

_UNROLL = 4  # parts loaded together: their latencies overlap


def _combine_kernel(parts_ref, lse_ref, ranks_ref, starts_ref, bounds_ref, o_ref, out_smem, *, group: int):
    """Weighs the parts of one (sequence, KV head) and writes its G rows; grid (S, K).

    GMEM: parts [S+W, K, H, C] and lse [S+W, K, C], of which (worker, list index) has row worker + index; the plan's
    arrays; out o [S, K, G, H]. SMEM: out [C, H]. A sequence that does not decode gets 0.
    """
    seq, head = lax.axis_index("seq"), lax.axis_index("head")
    cols, head_dim = out_smem.shape
    item = ranks_ref[seq]
    per_worker = lax.max(bounds_ref[1], 1)
    listed = lax.max(item, 0)
    first = lax.div(starts_ref[listed], per_worker)
    last = lax.select(item >= 0, lax.div(starts_ref[listed + 1] - 1, per_worker) + 1, first)

    def step(i, carry):
        acc, m, total = carry
        workers = [first + i * _UNROLL + u for u in range(_UNROLL)]
        rows = [lax.min(w, last - 1) + listed for w in workers]
        parts = [plgpu.load(parts_ref.at[row, head], layout=WGMMA, optimized=False) for row in rows]
        for w, row, part in zip(workers, rows, parts, strict=True):
            lse = plgpu.load(lse_ref.at[row, head], layout=WGMMA.reduce(0), optimized=False)
            lse = lse + lax.select(w < last, 0.0, MASKED)  # past the last part: one loaded twice
            m_new = jnp.maximum(m, lse)
            alpha, weight = jnp.exp2(m - m_new), jnp.exp2(lse - m_new)
            total = total * alpha + weight
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
            acc = acc + part * lax.broadcast_in_dim(weight, acc.shape, [1])
            m = m_new
        return acc, m, total

    state = (
        gpu.full((head_dim, cols), 0.0, WGMMA),
        gpu.full((cols,), NO_MAXIMUM, WGMMA.reduce(0)),
        gpu.full((cols,), 0.0, WGMMA.reduce(0)),
    )
    acc, _, total = lax.fori_loop(0, lax.div(last - first + (_UNROLL - 1), _UNROLL), step, state)
    total = jnp.where(total > 0, total, 1.0)
    out = (acc / lax.broadcast_in_dim(total, acc.shape, [1])).astype(out_smem.dtype)
    gpu.store(gpu.transposed(out_smem), out)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, group)], o_ref.at[seq, head])
    plgpu.wait_smem_to_gmem(0)


def combine(
    parts: Float32[Array, "rows K H C"],
    lse: Float32[Array, "rows K C"],
    plan: DecodePlan,
    *,
    group: int,
    dtype: jax.typing.DTypeLike,
    interpret: Any,
) -> Float[Array, "S K G H"]:
    """Returns the answers in `dtype`. There are S+W rows, C is G rounded up, and `lse` is in base 2."""
    S = plan.ranks.shape[0]
    _, K, H, cols = parts.shape
    return plgpu.kernel(
        functools.partial(_combine_kernel, group=group),
        out_type=jax.ShapeDtypeStruct((S, K, group, H), dtype),
        scratch_types=(plgpu.SMEM((cols, H), dtype),),
        grid=(S, K),
        grid_names=("seq", "head"),
        kernel_name="paged_decode_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts, lse, plan.ranks, plan.starts, plan.bounds)
