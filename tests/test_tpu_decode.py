"""The TPU's decode, which writes its new tokens too, in interpret mode: races detected, unwritten memory NaN."""

import importlib
from dataclasses import replace

import pytest
from attention_cases import cases, check_decode_step, make_case
from hypothesis import Phase, given, settings
from jax.experimental.pallas import tpu as pltpu
from tpu_cases import FAST, FORM, FORMS, compiled_step, each_form, planted

from jaxvllm.kernels.tpu import backend as paged_attention_tpu

pytestmark = pytest.mark.usefixtures("tpu_interpreter")


def _random_steps(form, max_examples, step):
    @settings(max_examples=max_examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    @given(case=cases(form, backend="tpu", decode_only=True))
    def run(case):
        check_decode_step("tpu", case, step)

    run()


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


# The suite itself: a fault planted in the kernel must show. Each is a change of its text.
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
    faulty = planted(importlib.import_module("jaxvllm.kernels.tpu.decode"), STEP_FAULTS[fault])
    monkeypatch.setattr(paged_attention_tpu, "attend_decode", faulty.attend_decode)
    form = replace(FORM, max_seqs=16)
    case = make_case(form, list(range(3, 128, 8)), [1] * 16, backend="tpu", decode_only=True)
    with pytest.raises(Exception, match=r"off by|no token may see|RACE DETECTED|not equal"):
        check_decode_step("tpu", case, compiled_step())
    pltpu.reset_tpu_interpret_mode_state()
