"""Logits to the next token of each sequence, on the device, in a few passes over the logits and without a sort.

A filter (top_k, top_p) is a question about one token: how many tokens are likelier, and how likely are they together?
So a token is drawn first and asked afterwards. One that a filter forbids is drawn again from the tokens likelier than
it, which all that are allowed belong to; two or three draws are usual, and their number grows with the logarithm of
the vocabulary at worst. On a CPU XLA's sort costs as much as hundreds of passes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt32

_GROUP_SIZE = 128  # tokens that are summed together before one is drawn
_MAX_DRAWS = 64  # each halves what is left to refuse, on average: an honest row needs a third of this
_SLICE_SIZE = 2**20  # logits that a CPU works on at a time: 4 MiB
_ONE_BITS = 0x3F800000  # of 1.0 in float32


class SamplingBatch(NamedTuple):
    """What the sampler needs of each of S sequences; a padding row is greedy. E ids are banned at most."""

    temperature: Float32[Array, " S"]  # 0 is greedy
    top_k: Int32[Array, " S"]  # 0 and below keep every token
    top_p: Float32[Array, " S"]  # in (0, 1]
    min_p: Float32[Array, " S"]  # in [0, 1]
    seeds: UInt32[Array, "S 2"]  # raw key data of the request
    positions: Int32[Array, " S"]  # folded into the key
    banned_token_ids: Int32[Array, "S E"]  # V pads


def sample(logits: Float32[Array, "S V"], batch: SamplingBatch) -> Int32[Array, " S"]:
    """Returns one token id per row, which depends on nothing but the row.

    At temperature 0 it is the argmax, the lowest id among equals. Otherwise filters apply in the order top_k, top_p
    (of the mass that top_k keeps), min_p, to the distribution at that temperature. Tokens of equal probability are
    kept or dropped together: where several tie for the last place, more than top_k of them remain.
    """
    with jax.named_scope("sample"):
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = logits.at[rows, batch.banned_token_ids].set(-jnp.inf, mode="drop")
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.lax.cond(
            jnp.any(batch.temperature > 0),
            lambda *rows: jax.lax.platform_dependent(*rows, cpu=_sample_in_slices, default=_sample_some),
            lambda logits, greedy, batch: greedy,
            logits,
            greedy,
            batch,
        )


def _sample_in_slices(
    logits: Float32[Array, "S V"], greedy: Int32[Array, " S"], batch: SamplingBatch
) -> Int32[Array, " S"]:
    """`_sample_some`, a few rows at a time: they stay in a CPU's caches, and wait only for one another's draws."""
    S, V = logits.shape
    num_rows = max(n for n in range(1, S + 1) if S % n == 0 and (n == 1 or n * V <= _SLICE_SIZE))
    slices = jax.tree.map(lambda rows: rows.reshape(S // num_rows, num_rows, *rows.shape[1:]), (logits, greedy, batch))
    return jax.lax.map(lambda rows: _sample_some(*rows), slices).reshape(S)


def _sample_some(logits: Float32[Array, "S V"], greedy: Int32[Array, " S"], batch: SamplingBatch) -> Int32[Array, " S"]:
    """Draws for the rows with a temperature; the others keep `greedy`, and so do rows without a finite maximum."""
    top_logits = jnp.take_along_axis(logits, greedy[:, None], axis=-1)
    is_drawn = (batch.temperature > 0) & jnp.isfinite(top_logits[:, 0])
    probs = _relative_probs(logits, top_logits, batch.temperature)
    keys = jax.random.wrap_key_data(batch.seeds, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, batch.positions)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (_MAX_DRAWS, 2)))(keys)
    top_k = jnp.where(batch.top_k > 0, batch.top_k, logits.shape[1])
    is_top_p = batch.top_p < 1
    is_top_k = top_k < logits.shape[1]
    is_filtered = is_top_k | is_top_p
    least = _least_of_top_k(probs, top_k, is_top_k & is_top_p & is_drawn)
    mass_limit = jnp.where(is_top_p, batch.top_p * _sum_from(probs, least), jnp.inf)

    def draw_again(state):
        num_draws, token_ids, least, is_open = state
        drawn = _draw(uniform[:, num_draws], probs, least)
        prob = _prob_of(probs, drawn)
        is_kept = jax.lax.cond(
            jnp.any(is_filtered & is_open),
            lambda: ~is_filtered | _passes(probs, prob, top_k, mass_limit),
            lambda: ~is_filtered,
        )
        token_ids = jnp.where(is_open & is_kept, drawn, token_ids)
        least = jnp.nextafter(prob, jnp.inf)  # what forbids a token forbids all that are no likelier
        return num_draws + 1, token_ids, least, is_open & ~is_kept

    def is_any_open(state):
        num_draws, _, _, is_open = state
        return jnp.any(is_open) & (num_draws < _MAX_DRAWS)

    least = jnp.maximum(least, batch.min_p * _prob_of(probs, greedy))
    start = (jnp.int32(0), greedy, least, is_drawn)
    return jax.lax.while_loop(is_any_open, draw_again, start)[1]


def _relative_probs(
    logits: Float32[Array, "S V"], top_logits: Float32[Array, "S 1"], temperature: Float32[Array, " S"]
) -> Float32[Array, "S groups size"]:
    """Each token's probability over that of the likeliest, in groups; zeros pad the last group."""
    temperature = jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)  # 0 / 0 would be NaN
    probs = jnp.exp((logits - top_logits) / temperature[:, None])
    probs = jnp.pad(probs, ((0, 0), (0, -logits.shape[1] % _GROUP_SIZE)))
    return probs.reshape(logits.shape[0], -1, _GROUP_SIZE)


def _prob_of(probs: Float32[Array, "S groups size"], token_ids: Int32[Array, " S"]) -> Float32[Array, " S"]:
    return jnp.take_along_axis(probs.reshape(len(probs), -1), token_ids[:, None], axis=-1)[:, 0]


def _draw(
    uniform: Float32[Array, "S 2"], probs: Float32[Array, "S groups size"], least: Float32[Array, " S"]
) -> Int32[Array, " S"]:
    """Draws one of the tokens with at least probability `least`: a group by its sum, then a token of the group."""
    least = least[:, None, None]
    group = _pick(jnp.sum(jnp.where(probs >= least, probs, 0), axis=-1), uniform[:, 0])
    in_group = jnp.take_along_axis(probs, group[:, None, None], axis=1)
    in_group = jnp.where(in_group >= least, in_group, 0)[:, 0]
    return group * _GROUP_SIZE + _pick(in_group, uniform[:, 1])


def _pick(weights: Float32[Array, "S n"], uniform: Float32[Array, " S"]) -> Int32[Array, " S"]:
    """Picks an index in proportion to its weight; never one of weight 0, unless there is no other."""
    sums = jnp.cumsum(weights, axis=-1)
    # The running sum may waver by a rounding where the weight is 0: the sum alone would not keep such an index out.
    is_past = (sums > uniform[:, None] * sums[:, -1:]) & (weights > 0)
    return jnp.argmax(is_past, axis=-1).astype(jnp.int32)


def _passes(
    probs: Float32[Array, "S groups size"],
    prob: Float32[Array, " S"],
    top_k: Int32[Array, " S"],
    mass_limit: Float32[Array, " S"],
) -> Bool[Array, " S"]:
    """Whether fewer than top_k tokens are likelier than `prob`, with less than `mass_limit` together."""
    is_likelier = probs > prob[:, None, None]
    num_likelier = _sum_groups(is_likelier.astype(jnp.int32))
    mass_likelier = _sum_groups(jnp.where(is_likelier, probs, 0))
    return (num_likelier < top_k) & (mass_likelier < mass_limit)


def _least_of_top_k(
    probs: Float32[Array, "S groups size"], top_k: Int32[Array, " S"], is_wanted: Bool[Array, " S"]
) -> Float32[Array, " S"]:
    """A probability that the top_k likeliest reach, and only they (and what ties with the last); 0 if not wanted.

    top_p after top_k needs it, since it means a share of what top_k keeps. Bisects the bits of the probability,
    whose order is that of the floats.
    """

    def bisect(state):
        low, high, num_from_low = state
        middle = (low + high) // 2
        num_from_middle = _sum_groups((bits >= middle[:, None, None]).astype(jnp.int32))
        is_low = num_from_middle >= top_k
        return (
            jnp.where(is_low, middle, low),
            jnp.where(is_low, high, middle),
            jnp.where(is_low, num_from_middle, num_from_low),
        )

    def is_any_wide(state):
        low, high, num_from_low = state
        return jnp.any(is_wanted & (high - low > 1) & (num_from_low != top_k))

    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)
    low = jnp.zeros_like(top_k)
    start = (low, jnp.full_like(low, _ONE_BITS + 1), jnp.full_like(low, probs.shape[1] * probs.shape[2]))
    low, _, _ = jax.lax.while_loop(is_any_wide, bisect, start)
    return jnp.where(is_wanted, jax.lax.bitcast_convert_type(low, jnp.float32), 0)


def _sum_from(probs: Float32[Array, "S groups size"], least: Float32[Array, " S"]) -> Float32[Array, " S"]:
    return _sum_groups(jnp.where(probs >= least[:, None, None], probs, 0))


def _sum_groups(values: Shaped[Array, "S groups size"]) -> Shaped[Array, " S"]:
    """Sums a row in two strides, which rounds less than one long sum."""
    return jnp.sum(jnp.sum(values, axis=-1), axis=-1)
