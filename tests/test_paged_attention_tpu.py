"""The TPU's kernels in interpret mode: races detected, memory that nothing wrote full of NaN."""

import functools
import importlib
import inspect
import logging
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Form, cases, check, check_decode_step, check_write, make_case
from hypothesis import Phase, given, settings
from jax.experimental.pallas import tpu as pltpu

from jaxvllm.kernels import paged_attention, paged_attention_tpu, tpu_cache_write, tpu_tiles
from jaxvllm.kernels.paged_attention import AttentionForm, resolve_backend

# Tiles so small that some dozen tokens take several chunks, sub-chunks, tiles and pieces.
TINY = tpu_tiles.ChipRule(
    decode_units=4,
    decode_chunk=64,
    decode_sub_chunk=32,
    prefill_rows=128,
    prefill_chunk=64,
    prefill_sub_chunk=32,
    prefill_heads_at_once=2,
    sums_in_product=True,
)
FORM = Form(num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, max_tokens=72, max_seqs=5, max_blocks=8)
FORMS = {
    "float32": FORM,
    "bfloat16_one_kv_head": replace(FORM, dtype="bfloat16", num_kv_heads=1, max_seqs=6),
    "window_head_64": replace(FORM, head_dim=64, sliding_window=20),
    "capped_head_80": replace(FORM, head_dim=80, num_heads=9, num_kv_heads=3, logits_soft_cap=3.0),
    "block_32_no_groups": replace(FORM, dtype="bfloat16", num_kv_heads=8, block_size=32, max_blocks=5, head_dim=96),
    "head_256_groups_of_16": replace(FORM, dtype="bfloat16", num_heads=16, num_kv_heads=1, head_dim=256),
    "block_128_window": replace(FORM, block_size=128, max_blocks=3, sliding_window=100),
    "head_64_bfloat16": replace(FORM, dtype="bfloat16", head_dim=64, block_size=64, max_blocks=4),
}
FAST = ("float32",)
each_phase = pytest.mark.parametrize("decode_only", [False, True], ids=["ragged", "decode"])


def each_form(names):
    """Parametrizes with FORMS; what is not in `names` is slow."""
    marks = {name: () if name in names else pytest.mark.slow for name in FORMS}
    return pytest.mark.parametrize("form", [pytest.param(FORMS[n], id=n, marks=marks[n]) for n in FORMS])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setitem(tpu_tiles.CHIPS, "tiny", TINY)
    monkeypatch.setitem(tpu_tiles.CHIPS, "tiny_two_cores", replace(TINY, cores=2, sums_in_product=False))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)):
        yield


def compiled(body=paged_attention_tpu.attend, chip: str | None = "tiny"):
    static = ("scale", "sliding_window", "logits_soft_cap", "decode_only")
    return jax.jit(functools.partial(body, chip=chip), static_argnames=static)


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


def _random_steps(form, max_examples, step):
    @settings(max_examples=max_examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    @given(case=cases(form, backend="tpu", decode_only=True))
    def run(case):
        check_decode_step("tpu", case, step)

    run()


def compiled_step(chip: str | None = "tiny"):
    static = ("scale", "sliding_window", "logits_soft_cap", "decode_only")
    backend = "tpu" if chip is None else f"tpu:{chip}"
    return jax.jit(functools.partial(paged_attention.write_and_attend, backend=backend), static_argnames=static)


@each_form(FAST)
def test_a_decode_step_writes_its_tokens_and_sees_them(form):
    _random_steps(form, 2, compiled_step())


@pytest.mark.slow
@each_form(FORMS)
def test_random_decode_steps_write_their_tokens_and_see_them(form):
    _random_steps(form, 8, compiled_step())


@pytest.mark.slow
def test_two_cores_write_their_own_heads_at_once():
    both = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(both):
        _random_steps(replace(FORM, num_heads=16, num_kv_heads=2), 4, compiled_step("tiny_two_cores"))


@pytest.mark.slow
def test_new_tokens_at_every_place_of_a_block_and_of_a_chunk():
    form = replace(FORM, dtype="bfloat16", max_blocks=9)
    step = compiled_step()
    for first in (1, 30, 60, 125):
        for start in range(first, first + 20, 5):
            lens = list(range(start, start + 5))
            check_decode_step("tpu", make_case(form, lens, [1] * 5, backend="tpu", decode_only=True), step)


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


def planted(module: types.ModuleType, changes: dict[str, str]) -> types.ModuleType:
    """Returns a copy of the module with its text changed; some change must apply."""
    text = inspect.getsource(module)
    faulty = functools.reduce(lambda text, change: text.replace(*change), changes.items(), text)
    assert faulty != text, "the kernel's text has moved on: plant the fault anew"
    copy = types.ModuleType(module.__name__)
    copy.__file__ = module.__file__
    exec(compile(faulty, f"<{module.__name__} with a fault>", "exec"), copy.__dict__)
    return copy


@pytest.mark.slow
@each_phase
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(monkeypatch, fault, decode_only):
    name = "decode" if decode_only else "ragged"
    module = importlib.import_module(f"jaxvllm.kernels.tpu_{name}")
    faulty = planted(module, FAULTS[fault])
    monkeypatch.setattr(paged_attention_tpu, f"attend_{name}", getattr(faulty, f"attend_{name}"))
    lens, news = [77, 120, 33, 5], [1] * 4 if decode_only else [30, 1, 33, 5]
    case = make_case(FORM, lens, news, backend="tpu", decode_only=decode_only)
    with pytest.raises(Exception, match=r"off by|no token may see|RACE DETECTED|not zero"):
        check("tpu", case, compiled())
    pltpu.reset_tpu_interpret_mode_state()


STEP_FAULTS = {
    "a tile is sent back from where the next chunk comes": {
        "copy(copy, home": "copy(kv_buf.at[slot, w * (C // P) + block, :, tile], home",
    },
    "a tile is overwritten while it is on its way": {
        "            _wait_sent(back, slot, sent_before)\n            sent, ": "            sent, "
    },
    "the last tiles are not waited for": {"            _wait_sent(back, 1 - slot, sent)\n": ""},
    "a new token beside its place": {"== (place & (tile_rows - 1))": "== (place & (tile_rows - 1)) + 1"},
    "a new token is sent back and not seen": {"block[h, tile] = copy[h]": "copy[h]"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_fault_planted_in_the_write_shows(monkeypatch, fault):
    faulty = planted(importlib.import_module("jaxvllm.kernels.tpu_decode"), STEP_FAULTS[fault])
    monkeypatch.setattr(paged_attention_tpu, "attend_decode", faulty.attend_decode)
    form = replace(FORM, max_seqs=16)
    case = make_case(form, list(range(3, 128, 8)), [1] * 16, backend="tpu", decode_only=True)
    with pytest.raises(Exception, match=r"off by|no token may see|RACE DETECTED|not equal"):
        check_decode_step("tpu", case, compiled_step())
    pltpu.reset_tpu_interpret_mode_state()
