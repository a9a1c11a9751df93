import subprocess
import sys

import pytest
from fake_device import (
    FakeDevice,
    check_integrity,
    make_scheduler,
    make_seq,
    run_all,
    run_step,
    solo_completion,
)

from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.sequence import Sequence, SequenceStatus


def _step(scheduler: Scheduler, *token_ids: int) -> list[Sequence]:
    seqs, is_prefill = scheduler.schedule()
    scheduler.postprocess(seqs, list(token_ids), is_prefill)
    check_integrity(scheduler)
    return seqs


def test_the_metadata_layer_does_not_import_jax():
    code = "import jaxvllm.engine.scheduler, sys; assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# order


def test_prefill_goes_first_then_decode_in_order_of_arrival():
    seqs = [make_seq(range(10 * i, 10 * i + 3), seq_id=i) for i in range(3)]
    scheduler = make_scheduler(*seqs[:2])
    assert tuple(scheduler.schedule()) == (seqs[:2], True)
    assert [seq.num_scheduled_tokens for seq in seqs[:2]] == [3, 3]
    scheduler.postprocess(seqs[:2], [7, 8], True)
    scheduler.add(seqs[2])
    assert tuple(scheduler.schedule()) == ([seqs[2]], True)
    scheduler.postprocess([seqs[2]], [9], True)
    assert tuple(scheduler.schedule()) == (seqs, False)
    assert [seq.num_scheduled_tokens for seq in seqs] == [1, 1, 1]
    assert [seq.is_prefill for seq in seqs] == [False] * 3


def test_a_long_prompt_runs_in_chunks_and_gives_one_token_after_the_last():
    seq = make_seq(range(10))
    scheduler = make_scheduler(seq, make_seq([50]), max_num_batched_tokens=4)
    for num_cached_tokens, num_scheduled_tokens in [(0, 4), (4, 4)]:
        seqs, is_prefill = scheduler.schedule()
        assert (seqs, is_prefill, seq.status) == ([seq], True, SequenceStatus.WAITING)
        assert (seq.num_cached_tokens, seq.num_scheduled_tokens) == (num_cached_tokens, num_scheduled_tokens)
        scheduler.postprocess(seqs, [99], True)
        assert seq.num_completion_tokens == 0
    assert _step(scheduler, 7, 8)[0] is seq
    assert seq.completion_token_ids == [7]


def test_only_the_first_sequence_of_a_step_may_be_cut():
    first, second = make_seq(range(3)), make_seq(range(50, 53))
    scheduler = make_scheduler(first, second, max_num_batched_tokens=5)
    assert _step(scheduler, 7) == [first]
    assert _step(scheduler, 8) == [second]


def test_a_step_holds_at_most_max_num_seqs():
    seqs = [make_seq([i]) for i in range(5)]
    scheduler = make_scheduler(*seqs, max_num_seqs=2)
    assert [len(_step(scheduler, 7, 8)) for _ in range(2)] == [2, 2]
    assert _step(scheduler, 7) == [seqs[4]]
    assert _step(scheduler, 7, 8) == seqs[:2]


def test_the_youngest_gives_way_first_and_all_return_in_order():
    seqs = [make_seq(range(50 * i, 50 * i + 4), 8, seq_id=i) for i in range(4)]
    old, middle, young, unseen = seqs
    scheduler = make_scheduler(*seqs, num_kvcache_blocks=3)
    assert _step(scheduler, 7, 8, 9) == [old, middle, young]
    assert _step(scheduler, 10) == [old]  # takes the block of the youngest; then the other finds none
    assert list(scheduler.waiting) == [middle, young, unseen]
    for seq, first_token in ((middle, 8), (young, 9)):
        assert (seq.status, seq.is_prefill, seq.block_table) == (SequenceStatus.WAITING, True, [])
        assert (seq.num_cached_tokens, seq.completion_token_ids) == (0, [first_token])


def test_nothing_to_do_is_our_own_mistake():
    with pytest.raises(AssertionError, match="max_seq_tokens"):
        make_scheduler(make_seq(range(17)), num_kvcache_blocks=4).schedule()


# ends


def _completion(tokens, eos: int | set[int] = -1, **params) -> tuple[list[int], str | None]:
    """What becomes of a request whose sampled ids are `tokens`, until it ends."""
    seq = make_seq([1, 2, 3], **{"max_tokens": 5, "ignore_eos": False, **params})
    scheduler = make_scheduler(seq, eos=eos)
    for token_id in tokens:
        if not seq.is_finished:
            _step(scheduler, token_id)
    assert seq.is_finished == scheduler.is_finished()
    return seq.completion_token_ids, seq.finish_reason


@pytest.mark.parametrize("eos", [9, {9}, {8, 9}, frozenset({9})])
def test_an_end_id_stops_and_is_kept(eos):
    assert _completion([4, 9, 5], eos) == ([4, 9], "stop")


@pytest.mark.parametrize("eos", [-1, set()])
def test_without_end_ids_the_length_stops(eos):
    assert _completion([4, 9, 5, 6, 7, 8], eos) == ([4, 9, 5, 6, 7], "length")


def test_any_of_several_end_ids_stops():
    assert _completion([4, 8], {8, 9}) == ([4, 8], "stop")


def test_ignore_eos_covers_all_end_ids_and_no_stop_id():
    assert _completion([8, 9, 7, 6], {8, 9}, ignore_eos=True, stop_token_ids=[7]) == ([8, 9, 7], "stop")


def test_a_stop_id_that_is_an_end_id_stops_under_ignore_eos():
    assert _completion([8, 9], {8, 9}, ignore_eos=True, stop_token_ids=[9]) == ([8, 9], "stop")


def test_end_and_stop_ids_wait_for_min_tokens():
    assert _completion([9, 7, 9, 5], 9, min_tokens=3, stop_token_ids=[7]) == ([9, 7, 9], "stop")


def test_an_end_id_as_the_last_token_is_a_stop():
    assert _completion([9], 9, max_tokens=1) == ([9], "stop")
    assert _completion([4], 9, max_tokens=1) == ([4], "length")


def test_an_end_id_in_the_prompt_stops_nothing():
    assert _completion([4, 5, 6, 7, 8], 2) == ([4, 5, 6, 7, 8], "length")


def test_many_that_finish_in_one_step_leave_the_others_in_order():
    seqs = [make_seq([i], max_tokens=2 if i % 3 else 9, seq_id=i) for i in range(8)]
    scheduler = make_scheduler(*seqs)
    _step(scheduler, *range(100, 108))
    _step(scheduler, *range(200, 208))
    assert [seq.seq_id for seq in scheduler.running] == [0, 3, 6]
    assert [seq.finish_reason for seq in seqs] == [None, "length", "length"] * 2 + [None, "length"]


def test_a_missing_token_is_noticed():
    scheduler = make_scheduler(make_seq([1]), make_seq([2]))
    seqs, is_prefill = scheduler.schedule()
    with pytest.raises(ValueError, match="shorter"):
        scheduler.postprocess(seqs, [5], is_prefill)


# abort


def _assert_gone(scheduler: Scheduler, seq: Sequence):
    assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, "abort")
    assert (seq.block_table, seq.num_cached_tokens, seq.num_scheduled_tokens) == ([], 0, 0)
    assert seq not in scheduler.waiting
    assert seq not in scheduler.running
    check_integrity(scheduler)


def test_abort_while_waiting():
    seqs = [make_seq([i]) for i in range(3)]
    scheduler = make_scheduler(*seqs)
    scheduler.abort(seqs[1])
    _assert_gone(scheduler, seqs[1])
    assert list(scheduler.waiting) == [seqs[0], seqs[2]]


def test_abort_between_the_chunks_of_a_prompt():
    long, short = make_seq(range(12)), make_seq([50])
    scheduler = make_scheduler(long, short, max_num_batched_tokens=5)
    _step(scheduler, 7)
    assert long.block_table
    scheduler.abort(long)
    _assert_gone(scheduler, long)
    assert not scheduler.block_manager.used_block_ids
    assert _step(scheduler, 8) == [short]


def test_abort_while_running():
    seqs = [make_seq([i], max_tokens=9) for i in range(3)]
    scheduler = make_scheduler(*seqs)
    _step(scheduler, 7, 8, 9)
    scheduler.abort(seqs[1])
    _assert_gone(scheduler, seqs[1])
    assert _step(scheduler, 7, 9) == [seqs[0], seqs[2]]


def test_abort_after_preemption():
    old, young = make_seq(range(4), 8), make_seq(range(50, 54), 8)
    scheduler = make_scheduler(old, young, num_kvcache_blocks=3)
    _step(scheduler, 7, 8)
    _step(scheduler, 9)
    scheduler.abort(young)
    _assert_gone(scheduler, young)
    assert scheduler.is_finished() is False


@pytest.mark.parametrize("prompt", [[1, 2, 3], range(100)], ids=["whole prompt", "chunk"])
def test_abort_while_the_prefill_is_in_flight(prompt):
    aborted, other = make_seq(prompt), make_seq([50], max_tokens=1)
    scheduler = make_scheduler(aborted)
    seqs, is_prefill = scheduler.schedule()
    scheduler.abort(aborted)
    _assert_gone(scheduler, aborted)
    scheduler.postprocess(seqs, [7], is_prefill)
    _assert_gone(scheduler, aborted)
    assert aborted.completion_token_ids == []
    assert scheduler.block_manager.hash_to_block_id == {}
    scheduler.add(other)
    _step(scheduler, 8)
    assert scheduler.is_finished()


def test_abort_while_a_decode_is_in_flight():
    seqs = [make_seq([i], max_tokens=2) for i in range(3)]
    scheduler = make_scheduler(*seqs)
    _step(scheduler, 7, 8, 9)
    scheduled, is_prefill = scheduler.schedule()
    scheduler.abort(seqs[1])
    scheduler.postprocess(scheduled, [4, 5, 6], is_prefill)
    _assert_gone(scheduler, seqs[1])
    assert [seq.completion_token_ids for seq in seqs] == [[7, 4], [8], [9, 6]]
    assert scheduler.is_finished()


def test_abort_leaves_a_finished_sequence_as_it_is():
    seq = make_seq([1], max_tokens=1)
    scheduler = make_scheduler(seq)
    _step(scheduler, 7)
    scheduler.abort(seq)
    assert (seq.finish_reason, seq.completion_token_ids) == ("length", [7])


def test_a_shared_block_survives_the_abort_of_one_holder():
    first, second = make_seq(range(9), max_tokens=9), make_seq([*range(8), 50], max_tokens=9)
    scheduler, device = make_scheduler(first), FakeDevice(4)
    run_step(scheduler, device)
    scheduler.add(second)
    run_step(scheduler, device)
    assert second.num_cached_prompt_tokens == 8
    scheduler.abort(first)
    run_all(scheduler, device)
    assert second.completion_token_ids == solo_completion(second)
