import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from jaxvllm.kernels.sampling import SamplingBatch, _sample_in_slices, _sample_some, sample

_sample = jax.jit(sample)
_INF = np.inf


def _batch(
    num_seqs: int,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    seed: int = 0,
    position: ArrayLike = 0,
    banned: tuple[int, ...] = (),
) -> SamplingBatch:
    """Every field given once is that of all rows; `seed` counts up from row to row."""

    def rows(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (num_seqs,)))

    seeds = np.zeros((num_seqs, 2), np.uint32)
    seeds[:, 1] = seed + np.arange(num_seqs)
    return SamplingBatch(
        temperature=rows(temperature, np.float32),
        top_k=rows(top_k, np.int32),
        top_p=rows(top_p, np.float32),
        min_p=rows(min_p, np.float32),
        seeds=jnp.asarray(seeds),
        positions=rows(position, np.int32),
        banned_token_ids=jnp.broadcast_to(jnp.asarray(banned, jnp.int32), (num_seqs, len(banned))),
    )


_NUM_ROWS, _NUM_IDS, _NUM_BANNED = 512, 300, 4  # one shape for most tests: each shape is a compilation


def _draws(logits: ArrayLike, num_draws: int = _NUM_ROWS, banned: tuple[int, ...] = (), **params) -> np.ndarray:
    """Draws from one row of logits with as many seeds; ids of -inf and bans past the last one fill the shape up."""
    padded = np.full((_NUM_ROWS, _NUM_IDS), -_INF, np.float32)
    padded[:, : np.size(logits)] = logits
    banned = (banned + (_NUM_IDS,) * _NUM_BANNED)[:_NUM_BANNED]
    params = {"seed": 0, **params}
    tokens = []
    while len(tokens) < num_draws:
        tokens += _sample(jnp.asarray(padded), _batch(_NUM_ROWS, banned=banned, **params)).tolist()
        params["seed"] += _NUM_ROWS
    return np.array(tokens[:num_draws])


def _oracle(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, slack=0.0) -> np.ndarray:
    """The filtered distribution, by sorting, in float64. `slack` widens (or narrows) what top_p and min_p keep."""
    scaled = np.asarray(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    if top_k > 0:
        least = np.sort(probs)[::-1][min(top_k, len(probs)) - 1]
        probs = np.where(probs >= least, probs, 0)
    probs = probs / probs.sum()
    if top_p < 1:
        falling = np.sort(probs)[::-1]
        likelier = np.append(0, np.cumsum(falling))[np.searchsorted(-falling, -probs)]
        probs = np.where(likelier < top_p + slack, probs, 0)
    probs = np.where(probs >= (min_p - slack) * probs.max(), probs, 0)
    return probs / probs.sum()


def _random_logits(shape, seed=0, scale=2.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)


# greedy


def test_temperature_zero_is_the_argmax():
    logits = _random_logits((3, 200))
    tokens = _sample(logits, _batch(3, temperature=0, top_k=3, top_p=0.1, min_p=0.9, banned=(200,)))
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))


def test_greedy_takes_the_lowest_id_among_equals():
    logits = jnp.zeros((3, 200)).at[:, [7, 150]].set(1.0)
    np.testing.assert_array_equal(_sample(logits, _batch(3, temperature=0, banned=(200,))), [7, 7, 7])


def _primitives(jaxpr) -> set[str]:
    """The names of all operations, those of inner programs too."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= _primitives(inner)
    return names


def test_a_greedy_batch_runs_no_more_than_an_argmax():
    jaxpr = jax.make_jaxpr(sample)(jnp.zeros((4, 500)), _batch(4)).jaxpr
    (cond,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    greedy, sampled = cond.params["branches"]
    assert greedy.jaxpr.eqns == []
    assert {"exp", "while"} <= _primitives(sampled.jaxpr)
    outside = {eqn.primitive.name for eqn in jaxpr.eqns if eqn is not cond}
    assert "argmax" in outside
    assert not outside & {"exp", "while", "scan", "random_bits", "cumsum"}


def test_nothing_is_sorted():
    assert "sort" not in _primitives(jax.make_jaxpr(sample)(jnp.zeros((4, 500)), _batch(4, top_k=3)).jaxpr)


# fault 14


def test_rows_of_different_temperatures_and_masked_logits_in_one_batch():
    logits = np.array(_random_logits((4, 50)))
    logits[0, ::2] = -_INF
    logits[1] = 0
    logits[2, :30] = -_INF
    logits[3] = -_INF
    logits[3, 17] = -3.0
    temperature = [0, 1, 0, 1]
    drawn = set()
    for seed in range(200):
        tokens = np.asarray(_sample(jnp.asarray(logits), _batch(4, temperature=temperature, seed=seed)))
        assert tokens[0] == np.argmax(logits[0])
        assert tokens[2] == np.argmax(logits[2])
        assert tokens[3] == 17
        drawn.add(int(tokens[1]))
    assert len(drawn) > 40


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}]
)
@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1.0, 1e6])
def test_the_one_token_that_is_left_is_drawn(params, temperature):
    logits = np.full(300, -_INF)
    logits[299] = 5.0
    assert set(_draws(logits, 20, temperature=temperature, **params)) == {299}


@pytest.mark.parametrize("bad", [np.nan, _INF, -_INF], ids=str)
def test_a_row_without_a_finite_maximum_gives_an_id_and_leaves_the_others_alone(bad):
    logits = np.array(_random_logits((3, 200)))
    batch = _batch(3, top_k=5, top_p=0.9, banned=(200,))
    good = np.asarray(_sample(jnp.asarray(logits), batch))
    logits[1] = bad
    tokens = np.asarray(_sample(jnp.asarray(logits), batch))
    assert 0 <= tokens[1] < 200
    np.testing.assert_array_equal(tokens[[0, 2]], good[[0, 2]])


def test_an_infinite_logit_is_taken():
    logits = np.zeros(200)
    logits[150] = _INF
    assert set(_draws(logits, 20, top_p=0.9)) == {150}


# distributions

_FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_k": -1},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.7},
    {"top_k": 7, "top_p": 0.7, "temperature": 2.0},
    {"top_k": 12, "min_p": 0.2},
    {"top_p": 0.8, "min_p": 0.2},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.15, "temperature": 1.5},
]


@pytest.mark.parametrize("params", _FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(params):
    logits = _random_logits(40, scale=1.5)
    num_draws = 8 * _NUM_ROWS
    expected = _oracle(logits, **params)
    counts = np.bincount(_draws(logits, num_draws, **params), minlength=40)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_squared = np.sum((counts - num_draws * expected)[kept] ** 2 / (num_draws * expected[kept]))
    freedom = kept.sum() - 1
    assert chi_squared <= freedom + 5 * np.sqrt(2 * freedom) + 1e-3  # about five standard deviations


def test_top_p_is_a_share_of_what_top_k_keeps():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(_draws(logits, top_p=0.65)) == {0, 1}
    assert set(_draws(logits, top_k=3, top_p=0.78)) == {0, 1, 2}  # 0.7 / 0.9 is less than 0.78
    assert set(_draws(logits, top_p=0.78)) == {0, 1, 2}
    assert set(_draws(logits, top_k=2, top_p=0.55)) == {0}  # 0.4 / 0.7 is more than 0.55


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.99}, {"top_k": 2, "min_p": 0.4}]
)
def test_tokens_that_tie_for_the_last_place_all_stay(params):
    logits = np.log([0.1, 0.2, 0.4, 0.2, 0.1])
    assert set(_draws(logits, **params)) == {1, 2, 3}


@st.composite
def _rows(draw):
    logits = draw(st.lists(st.sampled_from([-_INF, *np.linspace(-6, 6, 49)]), min_size=16, max_size=16))
    if max(logits) == -_INF:
        logits[draw(st.integers(0, 15))] = 0.0
    params = {
        "temperature": draw(st.sampled_from([0.3, 1.0, 2.0])),
        "top_k": draw(st.integers(-1, 18)),
        "top_p": draw(st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.05])),
        "min_p": draw(st.sampled_from([0.0, 0.03, 0.3, 1.0])),
    }
    return logits, params


@given(_rows(), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_every_draw_is_one_that_the_filters_keep(row, seed):
    logits, params = row
    kept = _oracle(logits, **params, slack=1e-5) > 0
    assert kept[_draws(logits, 64, seed=seed, **params)].all()


@pytest.mark.parametrize("params", [{}, {"top_k": 1}, {"top_p": 1e-4}, {"top_k": 3, "top_p": 0.5}], ids=str)
def test_a_large_vocabulary_of_nearly_equal_tokens(params):
    """The worst case of drawing again: all but a few tokens of 100,000 are refused."""
    logits = np.linspace(0, 0.1, 100_001)  # 782 groups, the last one short
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (8, len(logits)))
    tokens = np.ravel([_sample(rows, _batch(8, position=position, **params)) for position in range(16)])
    expected = _oracle(logits, **params)
    kept = np.flatnonzero(expected)
    assert np.isin(tokens, kept).all()
    assert len(set(tokens)) >= min(len(kept), 120)
    assert abs(tokens.mean() - expected @ np.arange(len(logits))) < 5 * kept.std() / np.sqrt(len(tokens)) + 1e-9


# independence


def test_a_rows_token_is_the_same_alone_and_in_any_batch():
    num_seqs, vocab_size = 12, 300
    rng = np.random.default_rng(3)
    logits = _random_logits((num_seqs, vocab_size))
    batch = _batch(
        num_seqs,
        temperature=rng.choice([0, 0.7, 1.0, 1.5], num_seqs),
        top_k=rng.choice([0, 1, 4, 40], num_seqs),
        top_p=rng.choice([1.0, 0.9, 0.3], num_seqs),
        min_p=rng.choice([0.0, 0.1], num_seqs),
        position=np.arange(num_seqs) * 7,
        banned=(0, vocab_size),
    )
    together = np.asarray(_sample(logits, batch))
    for size in (1, 4):
        for start in range(0, num_seqs, size):
            rows = slice(start, start + size)
            part = _sample(logits[rows], jax.tree.map(lambda field, rows=rows: field[rows], batch))
            np.testing.assert_array_equal(part, together[rows])


def test_slices_of_rows_change_no_token():
    logits = _random_logits((24, 2**16))
    batch = _batch(24, top_k=[0, 20, 0, 20] * 6, top_p=[1, 1, 0.9, 0.9] * 6)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    whole = jax.jit(_sample_some)(logits, greedy, batch)
    np.testing.assert_array_equal(jax.jit(_sample_in_slices)(logits, greedy, batch), whole)


def test_a_token_depends_on_the_seed_and_the_position():
    tokens = _draws(np.zeros(300))
    np.testing.assert_array_equal(_draws(np.zeros(300)), tokens)
    assert np.mean(tokens == _draws(np.zeros(300), position=1)) < 0.03
    assert np.mean(tokens == _draws(np.zeros(300), seed=_NUM_ROWS)) < 0.03


def test_both_words_of_a_seed_count():
    batch = _batch(_NUM_ROWS, banned=(_NUM_IDS,) * _NUM_BANNED)
    other = batch._replace(seeds=batch.seeds.at[:, 0].set(1))
    logits = jnp.zeros((_NUM_ROWS, _NUM_IDS))
    assert np.mean(np.asarray(_sample(logits, batch)) == np.asarray(_sample(logits, other))) < 0.03


# banned ids


@pytest.mark.parametrize("temperature", [0, 1])
def test_banned_ids_are_never_taken(temperature):
    logits = np.zeros(10)
    logits[[2, 5]] = 8.0
    tokens = _draws(logits, 200, temperature=temperature, banned=(5, 2, 300))
    assert not set(tokens) & {2, 5}


def test_padding_of_the_banned_ids_bans_nothing():
    logits = np.zeros(300)
    logits[299] = 8.0
    assert set(_draws(logits, 20, temperature=0, banned=(300, 300))) == {299}


def test_bans_are_those_of_the_row():
    logits = jnp.zeros((3, 200)).at[:, 1].set(5.0)
    banned = jnp.array([[1], [200], [2]], jnp.int32)
    np.testing.assert_array_equal(
        _sample(logits, _batch(3, temperature=0)._replace(banned_token_ids=banned)), [0, 1, 1]
    )
