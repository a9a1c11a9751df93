"""The arithmetic of the prefill kernel: one warpgroup's 64 query rows against one tile of K and V."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxvllm.kernels.gpu import common as gpu
from jaxvllm.kernels.gpu.common import MASKED, WGMMA
from jaxvllm.kernels.gpu.prefill_plan import COMPUTE_GROUPS, PrefillConfig, Segment


def attend_tile(state, smem, cleared, t, first_token, segment: Segment, config: PrefillConfig):
    """Folds K and V tile t into (acc [64, H], m [64], total [64]) of one warpgroup; m in base 2 and scaled.

    `smem` holds kv [tile, 2H], q [64, H], p [64, tile] and columns [tile]; `cleared` is the barrier of V's masking.
    """
    acc, m, total = state
    kv_smem, q_smem, p_smem, columns_smem = smem
    tile, head_dim = config.ring.tile, q_smem.shape[1]
    k_smem, v_smem = kv_smem.at[:, pl.ds(0, head_dim)], kv_smem.at[:, pl.ds(head_dim, head_dim)]

    base = t * tile
    pl.when((base + tile > segment.context) | (base < segment.low))(
        lambda: clear_values(v_smem, cleared, segment.low - base, segment.context - base)
    )
    s = gpu.product(q_smem, gpu.transposed(k_smem))
    s, factor = gpu.scores_in_base_2(s, config.scale, config.logits_soft_cap)
    s = lax.cond(
        _all_visible(base, first_token, segment, config),
        lambda s: s,
        lambda s: mask_scores(s, base, first_token, columns_smem, segment, config),
        s,
    )
    m_new = jnp.maximum(m, s.max(axis=1) * factor)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
    total = total * alpha + p.sum(axis=1)
    p_smem[...] = p.astype(p_smem.dtype)
    plgpu.commit_smem()

    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
    return gpu.add_product(acc, p_smem, v_smem, interpreted=config.interpreted), m_new, total


def _all_visible(base, first_token, segment: Segment, config: PrefillConfig):
    """Whether every row of the warpgroup sees every token of the tile at `base`."""
    last_token = first_token + config.box - 1
    visible = (segment.begin <= first_token) & (last_token < segment.end)
    visible &= base + config.ring.tile - 1 <= first_token + segment.shift
    if config.sliding_window is not None:
        visible &= base > last_token + segment.shift - config.sliding_window
    return visible


def mask_scores(s, base, first_token, columns_smem, segment: Segment, config: PrefillConfig):
    """Clears the scores that a row must not see; for a row of another sequence, all.

    The columns' numbers come from shared memory: computed, they would be hoisted out of the loop and spill.
    """
    row = plgpu.broadcasted_iota(jnp.int32, s.shape[:1], 0, layout=WGMMA.reduce(1))
    token = (row & (config.box - 1)) + first_token
    # a row sees the columns up to `last` of the tile; a row of another sequence, none
    is_own = (token >= segment.begin) & (token < segment.end)
    last = jnp.where(is_own, token + (segment.shift - base), jnp.full_like(token, -1))
    column = plgpu.load(columns_smem, layout=WGMMA.reduce(0), optimized=False)
    behind = lax.broadcast_in_dim(last, s.shape, [0]) - lax.broadcast_in_dim(column, s.shape, [1])
    if config.sliding_window is None:
        return jnp.where(behind >= 0, s, MASKED)
    # both bounds in one comparison: a column ahead is far behind as an unsigned number
    return jnp.where(behind.astype(jnp.uint32) < config.sliding_window, s, MASKED)


def clear_values(v_smem, cleared, first, last):
    """Clears V outside the tile's tokens [first, last): 0 * NaN is NaN. The warpgroups share the columns."""
    tile, head_dim = v_smem.shape
    group_id = lax.axis_index("warpgroup")
    for c in range(head_dim // 64):

        @pl.when(group_id == c % COMPUTE_GROUPS)
        def _(c=c):
            v_piece = v_smem.at[:, pl.ds(c * 64, 64)]
            token = plgpu.broadcasted_iota(jnp.int32, (tile, 64), 0, layout=WGMMA)
            v = plgpu.layout_cast(v_piece[...], WGMMA)
            v_piece[...] = jnp.where((token >= first) & (token < last), v, jnp.zeros_like(v))

    plgpu.commit_smem()
    plgpu.barrier_arrive(cleared)  # both have cleared their columns before either reads V
    plgpu.barrier_wait(cleared)
