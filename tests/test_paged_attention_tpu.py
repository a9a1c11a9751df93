"""The TPU's kernels in interpret mode: races detected, memory that nothing wrote full of NaN."""

import importlib
import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import cases, check, check_decode_step, check_write, make_case
from hypothesis import Phase, given, settings
from jax.experimental.pallas import tpu as pltpu
from tpu_cases import FAST, FORM, FORMS, compiled, compiled_step, each_form, each_phase, planted

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels.paged_attention import AttentionForm, resolve_backend
from jaxvllm.kernels.tpu import backend as paged_attention_tpu
from jaxvllm.kernels.tpu import cache_write as tpu_cache_write
from jaxvllm.kernels.tpu import tiles as tpu_tiles

pytestmark = pytest.mark.usefixtures("tpu_interpreter")
_attend = compiled()


def _random(form, decode_only, max_examples, attend):
    # derandomized: the same batches every time
    @settings(max_examples=max_examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    @given(case=cases(form, backend="tpu", decode_only=decode_only))
    def run(case):
        check("tpu", case, attend)

    run()


@each_phase
@each_form(FAST)
def test_random_batches_agree_with_the_oracle(form, decode_only):
    _random(form, decode_only, 2, _attend)


@pytest.mark.slow
@each_phase
@each_form(FORMS)
def test_two_hundred_random_batches_agree_with_the_oracle(form, decode_only):
    _random(form, decode_only, 14, _attend)  # times 16


@pytest.mark.slow
@each_phase
def test_two_cores_share_the_heads(decode_only):
    form = replace(FORM, num_heads=16, num_kv_heads=2)
    _random(form, decode_only, 4, compiled(chip="tiny_two_cores"))


@pytest.mark.slow
@each_phase
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_tiles_at_every_boundary(dtype, decode_only):
    """The tiles of a chip; contexts around blocks, sub-chunks and chunks, one token to thousands."""
    form = replace(FORM, dtype=dtype, max_seqs=8, max_blocks=140, max_tokens=640)
    lens = [1, 15, 16, 17, 255, 256, 257, 511], [512, 513, 1023, 1024, 1025, 2048, 2239, 2240]
    attend = compiled(chip=None)
    for group in lens:
        news = [1] * 8 if decode_only else [1, 2, 16, 17, 8, 256, 257, 9]
        news = [min(n, new) for n, new in zip(group, news, strict=True)]
        case = make_case(form, group, news, backend="tpu", decode_only=decode_only)
        check("tpu", case, attend)
        if decode_only:
            check_decode_step("tpu", case, compiled_step(None))


@pytest.mark.slow
@each_phase
def test_every_context_around_every_block_boundary(decode_only):
    form = replace(FORM, max_blocks=9, max_tokens=5 * 40)
    lens = [max(n * 16 + beside, 1) for n in range(1, 9) for beside in (-1, 0, 1)] + [144]
    for start in range(0, 25, 5):
        group = lens[start : start + 5]
        news = [1 if decode_only else min(n, 40) for n in group]
        check("tpu", make_case(form, group, news, backend="tpu", decode_only=decode_only), _attend)


@each_phase
def test_empty_rows_and_empty_batches_leave_zeros(decode_only):
    news = [1, 1, 0] if decode_only else [1, 0, 20]
    lens = [33, 5, 0] if decode_only else [33, 5, 40]
    check("tpu", make_case(FORM, lens, news, backend="tpu", decode_only=decode_only), _attend)
    check("tpu", make_case(FORM, [], [], backend="tpu", decode_only=decode_only), _attend)


@pytest.mark.slow
@each_phase
def test_the_order_of_a_batch_does_not_matter_nor_its_repetition(decode_only):
    lens, news = [13, 96, 128, 1, 47], [1] * 5 if decode_only else [5, 4, 20, 1, 40]
    case = make_case(FORM, lens, news, backend="tpu", decode_only=decode_only)
    order = [3, 0, 4, 2, 1]
    one, other = (
        np.split(np.asarray(check("tpu", c, _attend)), c.batch.cu_seqlens_q[1:]) for c in (case, case.reordered(order))
    )
    for place, s in enumerate(order):
        np.testing.assert_allclose(other[place], one[s], rtol=0, atol=2e-6)
    first = np.asarray(_attend(*case.arguments, **case.form.options, decode_only=decode_only))
    for _ in range(9):
        again = _attend(*case.arguments, **case.form.options, decode_only=decode_only)
        np.testing.assert_array_equal(np.asarray(again), first)


@pytest.mark.slow
@each_phase
def test_tables_beyond_the_scalar_memory_split_the_batch(monkeypatch, decode_only):
    monkeypatch.setattr(tpu_tiles, "_SMEM_TABLE_ENTRIES", 3 * FORM.max_blocks)
    lens, news = [33, 128, 16, 70, 1], [1] * 5 if decode_only else [9, 1, 16, 30, 1]
    case = make_case(FORM, lens, news, backend="tpu", decode_only=decode_only)
    check("tpu", case, compiled())
    if decode_only:
        check_decode_step("tpu", case, compiled_step())


def test_a_poisoned_sequence_does_not_reach_its_neighbours():
    case = make_case(FORM, [40, 33, 128], [1, 1, 1], backend="tpu", decode_only=True)
    block = case.batch.block_tables[2, 0]
    answer = _attend(*case.with_pool(case.pool.at[block].set(jnp.nan)).arguments, **FORM.options, decode_only=True)
    sound = _attend(*case.arguments, **FORM.options, decode_only=True)
    assert np.isnan(np.asarray(answer)[2]).all()
    np.testing.assert_array_equal(np.asarray(answer)[:2], np.asarray(sound)[:2])


@each_form(FAST)
def test_new_tokens_are_written_to_their_slots_and_nowhere_else(form):
    @settings(max_examples=4, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    @given(case=cases(form, backend="tpu", decode_only=False))
    def run(case):
        check_write("tpu", case)

    run()


def test_runs_of_slots_end_at_tiles_gaps_and_padding():
    slots = jnp.asarray([30, 31, 32, 33, 7, 99, 99, 64, 65, -1], jnp.int32)
    starts, lengths, firsts, count = tpu_cache_write.plan(slots, num_slots=96, grain=16)
    runs = [tuple(int(x[i]) for x in (starts, lengths, firsts)) for i in range(int(count[0]))]
    assert runs == [(0, 2, 30), (2, 2, 32), (4, 1, 7), (7, 2, 64)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "itemsize", "num_seqs"),
    [((32, 32), 128, 2, 512), ((16, 8), 256, 2, 512), ((32, 32), 128, 4, 256), ((8, 1), 128, 2, 4096)],
)
def test_a_decode_of_many_sequences_is_split_to_fit_the_vector_memory(heads, head_dim, itemsize, num_seqs):
    shape = tpu_tiles.Shape(
        num_tokens=num_seqs, num_seqs=num_seqs, num_kv_heads=heads[1], group=heads[0] // heads[1], lanes=head_dim,
        row_width=2 * head_dim, block_size=64, blocks_per_seq=64, itemsize=itemsize,
    )  # fmt: skip
    for chip in (None, "v5e", "v5p", "v6e", "tpu7x"):
        tiles = tpu_tiles.decode_tiles(shape, chip)
        assert tiles.seqs <= tiles.seqs_per_call
        assert tiles.seqs_per_call % tiles.seqs == 0
        assert tiles.vmem_limit_bytes <= 56 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 320}, "head_dim=320 is above 256, the TPU kernels' limit"),
        ({"block_size": 8}, "kvcache_block_size=8 is not a power of two from 16 to 256"),
        ({"block_size": 48}, "kvcache_block_size=48 is not a power of two"),
        ({"num_heads": 34}, "17 query heads per KV head"),
        ({"dtype": "float16"}, "no cache of float16"),
    ],
)
def test_what_the_kernel_is_not_made_for_is_refused_with_the_reason(change, message):
    form = replace(FORM, **change)
    H, K = form.head_dim, form.num_kv_heads
    pool = jnp.zeros((2, K, form.block_size, 2 * (-(-H // 128) * 128)), form.dtype)
    q, lens = jnp.zeros((1, form.num_heads, H), form.dtype), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=message):
        paged_attention.attend(q, pool, lens[None], lens, jnp.zeros(2, jnp.int32), lens, scale=1.0, backend="tpu")


QWEN = AttentionForm(16, 8, 128, 256, "bfloat16")


def test_the_backend_of_a_tpu_names_the_chip_whose_tiles_it_takes():
    assert resolve_backend("auto", "tpu", QWEN._replace(device_kind="TPU v6 lite")) == "tpu:v6e"
    assert resolve_backend("tpu", "tpu", QWEN._replace(device_kind="TPU v5")) == "tpu:v5p"
    assert resolve_backend("auto", "tpu", QWEN._replace(device_kind="TPU v99")) == "tpu"


def test_a_model_the_kernels_cannot_take_falls_back_with_one_line_or_is_refused_by_name(caplog):
    form = QWEN._replace(head_dim=512)
    with caplog.at_level(logging.WARNING):
        assert resolve_backend("auto", "tpu", form) == "xla"
    (line,) = caplog.messages
    assert "head_dim=512 is above 256" in line
    with pytest.raises(ValueError, match="'tpu' cannot be used: head_dim=512"):
        resolve_backend("tpu", "tpu", form)


# The suite itself: a fault planted in a kernel must show. Each is a change of the kernel's text.
FAULTS = {
    "a race: both steps in one buffer": {
        "kv_buf.at[slot]": "kv_buf.at[0]",
        "kv_buf.at[kv_slot]": "kv_buf.at[0]",
        "fold, kv_slot,": "fold, 0,",
    },
    "off by one in the last block": {
        "visible = column < ": "visible = column <= ",
        "visible = ahead >= 0": "visible = ahead >= -1",
    },
    "a read past the context": {" if boundary else v": " if False else v", " if masked else v": " if False else v"},
    "a missing wait": {"tpu.wait_blocks(": "(lambda *args, **options: None)("},
}


@pytest.mark.slow
@each_phase
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(monkeypatch, fault, decode_only):
    name = "decode" if decode_only else "ragged"
    module = importlib.import_module(f"jaxvllm.kernels.tpu.{name}")
    faulty = planted(module, FAULTS[fault])
    monkeypatch.setattr(paged_attention_tpu, f"attend_{name}", getattr(faulty, f"attend_{name}"))
    lens, news = [77, 120, 33, 5], [1] * 4 if decode_only else [30, 1, 33, 5]
    case = make_case(FORM, lens, news, backend="tpu", decode_only=decode_only)
    with pytest.raises(Exception, match=r"off by|no token may see|RACE DETECTED|not zero"):
        check("tpu", case, compiled())
    pltpu.reset_tpu_interpret_mode_state()
