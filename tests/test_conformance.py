"""Every backend against the oracle: random batches, and the lengths at which kernels go wrong."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FORMS, Form, cases, check, check_decode_step, check_write, make_case
from hypothesis import given, settings

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels import xla as paged_attention_xla

BACKENDS = {"xla": 16}  # backend: random batches per form, ragged and again decode
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
each_phase = pytest.mark.parametrize("decode_only", [False, True], ids=["ragged", "decode"])


@each_backend
@each_form
@each_phase
def test_random_batches_agree_with_the_oracle(backend, form, decode_only):
    # derandomized: the same batches every time
    @settings(max_examples=BACKENDS[backend], derandomize=True, deadline=None, database=None)
    @given(case=cases(form, backend=backend, decode_only=decode_only))
    def run(case):
        check(backend, case)

    run()


@each_backend
@each_form
def test_new_tokens_are_written_to_their_slots_and_nowhere_else(backend, form):
    @settings(max_examples=5, derandomize=True, deadline=None, database=None)
    @given(case=cases(form, backend=backend, decode_only=False))
    def run(case):
        check_write(backend, case)

    run()


@each_backend
@each_form
def test_a_decode_step_writes_its_tokens_and_sees_them(backend, form):
    @settings(max_examples=5, derandomize=True, deadline=None, database=None)
    @given(case=cases(form, backend=backend, decode_only=True))
    def run(case):
        check_decode_step(backend, case)

    run()


BOUNDARIES = Form(block_size=8, max_seqs=16, max_tokens=256, max_blocks=48)


@each_backend
def test_decode_at_every_block_boundary(backend):
    around = [n * 8 + d for n in range(1, 48) for d in (-1, 0, 1)]
    for start in range(0, len(around), 16):
        lens = around[start : start + 16][:: -1 if start % 32 else 1]
        check(backend, make_case(BOUNDARIES, lens, [1] * len(lens), backend=backend, decode_only=True))


@each_backend
def test_prompts_and_chunks_at_every_block_boundary(backend):
    for n in range(1, 48):
        lens = [max(n * 8 + d, 1) for d in (-1, 0, 1)]
        check(backend, make_case(BOUNDARIES, lens, [min(x, 80) for x in lens], backend=backend))


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context_len", [1, 3, 4, 5], ids=lambda n: f"context_{n}")
def test_a_cache_full_of_nan_is_as_good_as_one_of_zeros(backend, dtype, context_len):
    """Fault case 10: prefill, then chunk, then decode, at 1, P-1, P and P+1 tokens."""
    form = Form(dtype=dtype)
    for num_new, decode_only in ((context_len, False), ((context_len + 1) // 2, False), (1, True)):
        case = make_case(form, [context_len], [num_new], backend=backend, decode_only=decode_only)
        poisoned = check(backend, case)
        clean = check(backend, case.with_pool(jnp.nan_to_num(case.pool)))
        np.testing.assert_array_equal(np.asarray(poisoned), np.asarray(clean))


@each_backend
def test_padding_leaves_the_last_block_of_the_pool_alone(backend):
    """Fault case 13: a batch of one, padded to four, beside a live sequence in the pool's last block."""
    form = Form(max_seqs=4, max_blocks=2)
    case = make_case(form, [5], [1], backend=backend, decode_only=True, block_ids=[3, form.num_blocks - 1])
    pool = check_write(backend, case.with_pool(jnp.ones_like(case.pool)))
    block, offset = divmod(int(case.batch.slot_mapping[0]), form.block_size)
    untouched = np.ones(pool.shape[:3], bool)
    untouched[block, :, offset] = False
    assert (np.asarray(pool)[untouched] == 1).all()


@each_backend
@each_phase
def test_the_order_of_a_batch_does_not_matter(backend, decode_only):
    form = FORMS["small"]
    lens, news = [13, 4, 48, 1, 27], [1] * 5 if decode_only else [5, 4, 20, 1, 9]
    case = make_case(form, lens, news, backend=backend, decode_only=decode_only)
    order = [3, 0, 4, 2, 1]
    shuffled = case.reordered(order)
    one, other = (np.split(np.asarray(check(backend, c)), c.batch.cu_seqlens_q[1:6]) for c in (case, shuffled))
    for place, s in enumerate(order):
        np.testing.assert_allclose(other[place], one[s], rtol=0, atol=2e-6)


@each_backend
@each_phase
def test_the_same_batch_gives_the_same_bits(backend, decode_only):
    lens, news = [13, 100, 384, 1, 170], [1] * 5 if decode_only else [5, 100, 40, 1, 9]
    case = make_case(FORMS["long"], lens, news, backend=backend, decode_only=decode_only)
    first = np.asarray(check(backend, case))
    for _ in range(9):
        np.testing.assert_array_equal(np.asarray(check(backend, case)), first)


@each_backend
def test_contexts_from_one_token_to_thousands(backend):
    form = Form(num_heads=2, num_kv_heads=1, block_size=16, max_seqs=4, max_blocks=256, max_tokens=128)
    lens = [1, 4096, 700, 1000]
    check(backend, make_case(form, lens, [1] * 4, backend=backend, decode_only=True))
    check(backend, make_case(form, lens, [1, 90, 30, 7], backend=backend))


@each_backend
def test_a_prompt_in_chunks_equals_the_whole_prompt(backend):
    form = FORMS["long"]
    case = make_case(form, [150], [150], backend=backend)
    whole = np.asarray(check(backend, case))[:150]
    for begin, end in ((0, 1), (1, 17), (17, 100), (100, 150)):
        part = case.chunk(begin, end)
        np.testing.assert_allclose(np.asarray(check(backend, part))[: end - begin], whole[begin:end], atol=2e-6)


# The suite itself: a fault planted in a backend that is right must show.


def _two_sequences(decode_only):
    news = [1, 1] if decode_only else [13, 7]
    return make_case(FORMS["small"], [13, 30], news, backend="xla", decode_only=decode_only)


def _attend(*arguments, **options):
    return paged_attention.attend(*arguments, **options, backend="xla")


def _with_context(change):
    def attend(q, pool, tables, context_lens, cu_seqlens_q, num_seqs, **options):
        return _attend(q, pool, tables, change(context_lens), cu_seqlens_q, num_seqs, **options)

    return attend


def _next_block(q, pool, tables, *rest, **options):
    return _attend(q, pool, jnp.roll(tables, 1, axis=0), *rest, **options)


def _next_row(q, pool, tables, context_lens, cu_seqlens_q, num_seqs, **options):
    return _attend(q, pool, tables, context_lens, cu_seqlens_q.at[1].add(1), num_seqs, **options)


FAULTS = {
    "the last token of the last block is left out": _with_context(lambda n: jnp.maximum(n - 1, 0)),
    "a slot past the context is read": _with_context(lambda n: jnp.where(n > 0, n + 1, 0)),
    "another sequence's blocks are read": _next_block,
}


@each_phase
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_shows(fault, decode_only):
    case = _two_sequences(decode_only)
    check("xla", case)
    with pytest.raises(AssertionError, match=r"off by|no token may see"):
        check("xla", case, fault)


def test_a_row_given_to_the_wrong_sequence_shows():
    with pytest.raises(AssertionError, match=r"off by|no token may see"):
        check("xla", _two_sequences(decode_only=False), _next_row)


@pytest.mark.parametrize("mask", ["live", "visible"])
@each_phase
def test_a_dropped_mask_shows(monkeypatch, mask, decode_only):
    sound = paged_attention_xla._attend_chunk

    def without(q, pool, ids, visible, live, softmax, options):
        masks = {"visible": visible, "live": live}
        masks[mask] = jnp.ones_like(masks[mask])
        return sound(q, pool, ids, masks["visible"], masks["live"], softmax, options)

    monkeypatch.setattr(paged_attention_xla, "_attend_chunk", without)
    untraced = inspect.unwrap(paged_attention_xla.attend)  # the jitted one may have been traced without the fault
    with pytest.raises(AssertionError, match=r"off by|no token may see"):
        check("xla", _two_sequences(decode_only), untraced)
