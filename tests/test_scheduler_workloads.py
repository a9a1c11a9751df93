"""Small workloads run to their end: the faults that engines of this kind have had, and any others."""

import pytest
from fake_device import (
    CheckedScheduler,
    Config,
    FakeDevice,
    check_integrity,
    fail,
    make_loop,
    make_scheduler,
    make_seq,
    run_all,
    run_step,
    solo_completion,
    solo_run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.scheduler import Scheduler


def test_what_never_fits_is_known_beforehand_and_the_rest_finishes():  # fault 1
    scheduler = make_scheduler(num_kvcache_blocks=4)
    assert scheduler.max_seq_tokens == 17
    too_long = 40
    assert too_long > scheduler.max_seq_tokens - 1  # an engine refuses it with this limit
    room = scheduler.max_seq_tokens - 16
    full = make_seq(range(16), max_tokens=min(4, room))
    short = make_seq(range(3))
    scheduler.add(full)
    scheduler.add(short)
    run_all(scheduler, FakeDevice(4))
    assert (full.num_completion_tokens, full.finish_reason) == (1, "length")
    assert short.completion_token_ids == solo_completion(short)


@pytest.mark.parametrize("num_prompt_tokens", range(1, 17))
def test_a_sequence_of_max_seq_tokens_finishes_however_it_is_split(num_prompt_tokens):  # fault 1
    scheduler = make_scheduler(num_kvcache_blocks=4)
    seqs = [
        make_seq(range(start, start + num_prompt_tokens), scheduler.max_seq_tokens - num_prompt_tokens)
        for start in (0, 100, 200)
    ]
    for seq in seqs:
        scheduler.add(seq)
    run_all(scheduler, FakeDevice(4))
    for seq in seqs:
        assert seq.num_tokens == 17
        assert seq.completion_token_ids == solo_completion(seq)


@pytest.mark.parametrize("length", [4, 8, 7, 9])
def test_a_prompt_sent_twice_computes_a_token_and_gives_the_same(length):  # fault 2
    first, second = make_seq(range(length)), make_seq(range(length))
    scheduler, device = make_scheduler(first), FakeDevice(4)
    run_all(scheduler, device)
    scheduler.add(second)
    step = scheduler.schedule()
    assert 1 <= second.num_scheduled_tokens == length - second.num_cached_tokens
    assert second.num_cached_tokens == (length - 1) // 4 * 4
    scheduler.postprocess(step.seqs, device.dispatch(step), step.is_prefill)
    run_all(scheduler, device)
    assert second.completion_token_ids == first.completion_token_ids == solo_completion(first)


@pytest.mark.parametrize("extra", [[], [77]], ids=["P and P", "P and P+x"])
@pytest.mark.parametrize("length", [3, 4, 8, 9])
def test_a_prompt_beside_its_own_continuation(length, extra):  # fault 3
    seqs = [make_seq(range(length)), make_seq([*range(length), *extra])]
    scheduler, device = make_scheduler(*seqs), FakeDevice(4)
    assert run_step(scheduler, device) == (seqs, True)
    run_all(scheduler, device)
    for seq in seqs:
        assert seq.completion_token_ids == solo_completion(seq)
    assert all(block.ref_count == 0 for block in scheduler.block_manager.blocks)


@pytest.mark.parametrize("max_num_batched_tokens", [3, 64])
def test_a_prompt_over_a_warm_prefix_schedules_exactly_the_rest(max_num_batched_tokens):  # fault 5
    warm, seq = make_seq(range(9)), make_seq([*range(8), 50, 51, 52, 53, 54])
    scheduler, device = make_scheduler(warm, max_num_batched_tokens=max_num_batched_tokens), FakeDevice(4)
    run_all(scheduler, device)
    scheduler.add(seq)
    step = scheduler.schedule()
    assert seq.num_cached_tokens == 8
    assert seq.num_scheduled_tokens == min(5, max_num_batched_tokens)
    scheduler.postprocess(step.seqs, device.dispatch(step), True)
    run_all(scheduler, device)
    assert seq.completion_token_ids == solo_completion(seq)


def test_preemption_changes_no_token(monkeypatch):  # fault 6
    num_preempted = 0
    preempt = Scheduler.preempt

    def counted(self, seq):
        nonlocal num_preempted
        num_preempted += 1
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "preempt", counted)
    completions = {}
    for num_blocks in (5, 64):
        seqs = [make_seq(range(4), 10), make_seq(range(50, 54), 10)]
        num_preempted = 0
        run_all(make_scheduler(*seqs, num_kvcache_blocks=num_blocks), FakeDevice(4))
        completions[num_blocks] = [seq.completion_token_ids for seq in seqs]
        assert (num_preempted > 0) == (num_blocks == 5)
    assert completions[5] == completions[64]
    assert [len(completion) for completion in completions[5]] == [10, 10]


def test_the_prefix_hit_that_is_reported_survives_preemption():
    warm = make_seq(range(5), 1)
    scheduler, device = make_scheduler(warm, num_kvcache_blocks=5), FakeDevice(4)
    run_all(scheduler, device)
    old, young = make_seq(range(50, 54), 9), make_seq(range(5), 9)
    scheduler.add(old)
    scheduler.add(young)
    num_cached = set()
    while not scheduler.is_finished():
        run_step(scheduler, device)
        num_cached.add(young.num_cached_prompt_tokens)
    assert num_cached == {4}
    assert (warm.num_cached_prompt_tokens, old.num_cached_prompt_tokens) == (0, 0)


@st.composite
def _workloads(draw):
    block_size = draw(st.integers(2, 5))
    num_blocks = draw(st.integers(2, 9))
    config = Config(
        num_kvcache_blocks=num_blocks,
        kvcache_block_size=block_size,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        eos=draw(st.sampled_from([-1, set(range(0, 1000, 7))])),
    )
    limit = num_blocks * block_size + 1
    requests = []
    for seq_id in range(draw(st.integers(1, 7))):
        # few different tokens and long common beginnings, so that prefixes are found and shared
        length = draw(st.integers(1, limit - 1))
        prompt = [0] * draw(st.integers(0, length))
        prompt += draw(st.lists(st.integers(0, 1), min_size=length - len(prompt), max_size=length - len(prompt)))
        seq = make_seq(
            prompt,
            draw(st.integers(1, limit - length)),
            seq_id=seq_id,
            block_size=block_size,
            ignore_eos=draw(st.booleans()),
        )
        requests.append((draw(st.integers(0, 12)), seq))
    aborts = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, len(requests) - 1)), max_size=3))
    return config, sorted(requests, key=lambda request: request[0]), aborts


@given(_workloads())
@settings(max_examples=150, deadline=None)
def test_any_workload_gives_each_request_its_solo_run(workload):
    """Blocks are shared, evicted, preempted and aborted, and no request can tell; no block is ever lost."""
    config = workload[0]
    scheduler, device = Scheduler(config), FakeDevice(config.kvcache_block_size)
    run_workload(scheduler, workload, lambda _: run_step(scheduler, device))


@given(_workloads(), st.sets(st.integers(0, 20), max_size=2))
@settings(max_examples=150, deadline=None)
def test_any_workload_gives_each_request_its_solo_run_with_steps_dispatched_ahead(workload, failures):
    config = workload[0]
    scheduler = CheckedScheduler(config)
    loop = make_loop(scheduler, FakeDevice(config.kvcache_block_size))

    def step(number):
        if number in failures:
            fail(loop)
        loop.run_step()

    run_workload(scheduler, workload, step)


def run_workload(scheduler, workload, step_of):
    """Runs requests and aborts to their end, a step at a time, and compares each request with its solo run."""
    config, requests, aborts = workload
    seqs = {seq.seq_id: seq for _, seq in requests}
    for step in range(5000):
        while requests and requests[0][0] <= step:
            scheduler.add(requests.pop(0)[1])
        queued = [*scheduler.waiting, *scheduler.running]
        for at, seq_id in aborts:
            if at == step and seqs[seq_id] in queued:
                scheduler.abort(seqs[seq_id])
                check_integrity(scheduler)
        if not scheduler.is_finished():
            step_of(step)
        elif not requests:
            break
    assert scheduler.is_finished()
    assert not requests
    assert len(scheduler.block_manager.free_block_ids) == config.num_kvcache_blocks
    for seq in seqs.values():
        alone = solo_run(seq, config.eos)
        if seq.finish_reason == "abort":
            assert seq.completion_token_ids == alone.completion_token_ids[: seq.num_completion_tokens]
        else:
            assert seq.completion_token_ids == alone.completion_token_ids
            assert seq.finish_reason == alone.finish_reason


def test_steps_run_ahead_whenever_no_id_is_needed_to_decide():
    seqs = [make_seq(range(100 * i, 100 * i + 6), 5) for i in range(3)]
    loop = make_loop(make_scheduler(*seqs), FakeDevice(4))
    num_steps = num_ahead = 0
    while not loop.scheduler.is_finished():
        loop.run_step()
        num_steps += 1
        num_ahead += loop._in_flight is not None
    assert num_steps == 5, "a request that ends at max_tokens costs no step more"
    assert num_ahead == 4


def test_a_token_past_the_end_is_dropped_and_its_blocks_are_freed():
    seq = make_seq(range(7), 20)
    end = solo_completion(seq)[4]
    ended = make_seq(range(7), 20, stop_token_ids=[end])
    loop = make_loop(make_scheduler(ended), FakeDevice(4))
    while not loop.scheduler.is_finished():
        loop.run_step()
    assert ended.completion_token_ids == solo_completion(seq)[:5]
    assert ended.num_tokens == len(ended.token_ids) == 12
    assert len(loop.scheduler.block_manager.free_block_ids) == 64


def test_a_generated_block_is_found_again_one_step_later_with_steps_dispatched_ahead():
    seq = make_seq(range(7), 6)
    loop = make_loop(make_scheduler(seq), FakeDevice(4))
    index = loop.scheduler.block_manager.hash_to_block_id
    sizes = []
    while not loop.scheduler.is_finished():
        loop.run_step()
        sizes.append(len(index))
    assert sizes == [1, 2, 2, 2, 2, 3]


def test_a_waiting_prompt_is_hashed_once_while_it_waits(monkeypatch):
    num_hashes = 0
    compute_hash = BlockManager.compute_hash

    def counted(token_ids, prefix=-1):
        nonlocal num_hashes
        num_hashes += 1
        return compute_hash(token_ids, prefix)

    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(counted))
    seqs = [make_seq(range(16), 9), make_seq([*range(16), *range(50, 67)], 1)]
    scheduler = make_scheduler(*seqs, num_kvcache_blocks=9)
    run_all(scheduler, FakeDevice(4))
    assert num_hashes == sum(len(seq.block_hashes) for seq in seqs)
    assert [len(seq.block_hashes) for seq in seqs] == [6, 8]
