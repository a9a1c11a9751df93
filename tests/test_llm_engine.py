"""The loop on a tiny model: same tokens whatever the company, and every fault answered with a reason."""

import dataclasses

import numpy as np
import pytest
from engines import GREEDY, assert_all_blocks_free, forget, make_llm, random_prompts, solo

from jaxvllm import SamplingParams
from jaxvllm.engine.stats import compile_count

VOCAB = 200


@pytest.fixture(scope="module")
def llm(tiny_llama_path):
    """One engine for the tests that need nothing special; its compiled programs serve them all."""
    return make_llm(tiny_llama_path)


def switch(llm, async_scheduling: bool):
    """The same engine and programs, with steps in turn or overlapped."""
    llm.engine.config = dataclasses.replace(llm.config, async_scheduling=async_scheduling)


@pytest.fixture(autouse=True)
def _fresh(request):
    if "llm" in request.fixturenames:
        forget(request.getfixturevalue("llm"))


def greedy(max_tokens=8, **options):
    return SamplingParams(**GREEDY | options, max_tokens=max_tokens)


def run(llm, prompts, params):
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


LENGTHS = (1, 3, 4, 5, 8, 13, 20, 31) * 4


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS, vocab_size=VOCAB, seed=1)


@pytest.fixture(scope="module")
def alone(llm, prompts):
    tokens = [solo(llm, prompt, greedy(12)) for prompt in prompts]
    assert min(len(set(t)) for t in tokens) > 3, "a model that repeats itself would prove nothing"
    return tokens


class TestSameTokensInAnyCompany:
    def test_in_a_batch_of_32(self, tiny_llama_path, prompts, alone):
        llm = make_llm(tiny_llama_path, max_num_seqs=32, max_num_batched_tokens=512, num_kvcache_blocks=512)
        assert run(llm, prompts, greedy(12)) == alone

    def test_with_a_warm_prefix(self, llm, prompts, alone):
        few = slice(8)  # they all stay in the cache
        run(llm, prompts[few], greedy(12))
        outputs = llm.generate(prompts[few], greedy(12), use_tqdm=False)
        assert [output.token_ids for output in outputs] == alone[few]
        assert [output.num_cached_tokens for output in outputs] == [(length - 1) // 4 * 4 for length in LENGTHS[few]]

    def test_with_chunks_of_7_tokens(self, tiny_llama_path, prompts, alone):
        llm = make_llm(tiny_llama_path, max_num_batched_tokens=7, max_num_seqs=7)
        assert run(llm, prompts, greedy(12)) == alone

    def test_after_preemption(self, tiny_llama_path, prompts, alone, monkeypatch):
        llm = make_llm(tiny_llama_path, num_kvcache_blocks=14)
        preempted = []
        preempt = llm.engine.scheduler.preempt
        monkeypatch.setattr(llm.engine.scheduler, "preempt", lambda seq: (preempted.append(seq.seq_id), preempt(seq)))
        assert run(llm, prompts, greedy(12)) == alone
        assert preempted
        assert_all_blocks_free(llm)

    def test_sampled_with_seeds(self, tiny_llama_path, llm, prompts):
        params = [
            SamplingParams(temperature=0.9, top_k=20, max_tokens=10, ignore_eos=True, seed=i)
            for i in range(len(prompts))
        ]
        alone = [solo(llm, prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        crowded = make_llm(tiny_llama_path, num_kvcache_blocks=14)
        assert run(crowded, prompts, params) == alone


def test_requests_without_a_seed_differ_from_each_other_and_not_between_runs(tiny_llama_path):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, again = (run(make_llm(tiny_llama_path), [[5, 6]] * 3, params) for _ in range(2))
    other = run(make_llm(tiny_llama_path, seed=1), [[5, 6]] * 3, params)
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 6


class TestLimits:
    def test_prompt_larger_than_the_pool_is_refused_and_others_finish(self, tiny_llama_path):
        """Fault case 1: 4 blocks of 4 tokens."""
        llm = make_llm(tiny_llama_path, num_kvcache_blocks=4)
        with pytest.raises(ValueError, match=r"40 tokens.*4 blocks of 4 hold 16.*num_kvcache_blocks"):
            llm.add_request([1] * 40, greedy())
        [output] = llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
        assert len(output.token_ids) == 4

    def test_completion_larger_than_the_pool_is_cut_with_reason_length(self, tiny_llama_path):
        """Fault case 1: a prompt that fills the pool and wants 4 more tokens gets the one that needs no slot."""
        llm = make_llm(tiny_llama_path, num_kvcache_blocks=4)
        outputs = llm.generate([[7] * 16, [1, 2, 3]], greedy(4), use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [1, 4]
        assert outputs[0].finish_reason == "length"
        [output] = llm.generate([[7] * 10], greedy(60), use_tqdm=False)
        assert len(output.token_ids) == 16 + 1 - 10
        assert_all_blocks_free(llm)

    @pytest.mark.parametrize("length", [4, 8, 7, 9])
    def test_prompt_sent_twice_recomputes_at_least_one_token(self, llm, length):
        """Fault case 2."""
        [prompt] = random_prompts([length], vocab_size=VOCAB, seed=length)
        first, second = (llm.generate([prompt], greedy(), use_tqdm=False)[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert second.num_cached_tokens == (length - 1) // 4 * 4

    def test_prompt_beside_its_extension_equals_solo_runs(self, llm):
        """Fault case 3: [P, P] and [P, P+x] in one batch."""
        [prompt] = random_prompts([12], vocab_size=VOCAB, seed=3)
        alone = solo(llm, prompt, greedy()), solo(llm, [*prompt, 5], greedy())
        forget(llm)
        assert run(llm, [prompt, prompt], greedy()) == [alone[0], alone[0]]
        forget(llm)
        assert run(llm, [prompt, [*prompt, 5]], greedy()) == list(alone)
        assert_all_blocks_free(llm)

    @pytest.mark.parametrize("batched", range(3, 12))
    def test_chunked_prompt_gives_one_token_after_its_last_chunk(self, tiny_llama_path, llm, batched):
        """Fault case 4."""
        [prompt] = random_prompts([10], vocab_size=VOCAB, seed=4)
        alone = solo(llm, prompt, greedy(1))
        chunked = make_llm(tiny_llama_path, max_num_batched_tokens=batched, max_num_seqs=3, token_buckets=(16,))
        request_id = chunked.add_request(prompt, greedy(1))
        outputs, num_steps = [], 0
        while not chunked.is_finished():
            outputs += chunked.step()
            num_steps += 1
        assert [(o.request_id, o.token_ids) for o in outputs] == [(request_id, alone)]
        assert num_steps == -(-10 // batched)

    def test_warm_prefix_and_a_longer_prompt_add_up(self, llm):
        """Fault case 5."""
        [prompt] = random_prompts([13], vocab_size=VOCAB, seed=5)
        alone = solo(llm, prompt, greedy())
        forget(llm)
        run(llm, [prompt[:8]], greedy(1))
        before = llm.stats.num_prompt_tokens
        [output] = llm.generate([prompt], greedy(), use_tqdm=False)
        assert output.token_ids == alone
        assert output.num_cached_tokens + llm.stats.num_prompt_tokens - before == 13

    def test_preempted_requests_get_exactly_their_tokens(self, tiny_llama_path, llm):
        """Fault case 6."""
        prompts = random_prompts([4, 4], vocab_size=VOCAB, seed=6)
        small = make_llm(tiny_llama_path, num_kvcache_blocks=5)
        tokens = run(small, prompts, greedy(10))
        assert [len(t) for t in tokens] == [10, 10]
        assert tokens == run(llm, prompts, greedy(10))

    def test_prompts_around_max_model_len_have_defined_ends(self, tiny_llama_path):
        """Fault case 7."""
        llm = make_llm(tiny_llama_path, max_model_len=24)
        [output] = llm.generate([[3] * 23], greedy(9), use_tqdm=False)
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        for length in (24, 25):
            with pytest.raises(ValueError, match=rf"{length} tokens.*max_model_len=24.*raise max_model_len"):
                llm.generate([[3] * length], greedy(), use_tqdm=False)
        [output] = llm.generate([[3] * 5], greedy(9), use_tqdm=False)
        assert len(output.token_ids) == 9

    def test_max_model_len_is_cut_to_what_the_model_was_made_for(self, tiny_llama_path):
        llm = make_llm(tiny_llama_path, max_model_len=10**6)
        assert llm.config.max_model_len == llm.engine.model_config.max_position_embeddings


class TestPrompts:
    @pytest.mark.parametrize("bad", [[], "", np.array([], np.int32)])
    def test_empty_prompt_is_refused_before_anything_runs(self, llm, bad):
        """Fault case 8."""
        with pytest.raises(ValueError, match="empty"):
            llm.add_request(bad, greedy())
        with pytest.raises(ValueError, match=r"prompt 1: .*empty"):
            llm.generate([[1, 2], bad], greedy(), use_tqdm=False)
        assert llm.is_finished()
        llm.add_request([1, 2], greedy(3))
        with pytest.raises(ValueError, match="empty"):
            llm.add_request(bad, greedy())
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert [len(output.token_ids) for output in outputs] == [3]

    @pytest.mark.parametrize("bad", [-1, 10**6, 1.5, "a", True, None])
    def test_what_is_no_token_id_of_the_model_is_refused(self, llm, bad):
        """Fault case 17."""
        with pytest.raises(ValueError, match=r"vocabulary|token ids"):
            llm.add_request([1, bad], greedy())
        assert llm.is_finished()

    def test_token_ids_may_be_a_numpy_array(self, llm):
        assert run(llm, np.array([4, 5, 6]), greedy()) == run(llm, [[4, 5, 6]], greedy())


class TestEnds:
    def end_run(self, llm, position=3):
        """A prompt, its free run, and the id that stands at `position` for the first time."""
        for seed in range(20):
            [prompt] = random_prompts([6], vocab_size=VOCAB, seed=seed)
            tokens = solo(llm, prompt, greedy(10))
            if tokens[position] not in tokens[:position]:
                return prompt, tokens
        raise AssertionError("no run without repetition")

    def test_any_end_id_stops_and_ignore_eos_covers_all(self, tiny_llama_path, llm):
        """Fault case 9; the union with the files' ids is tested with the loader and the tokenizer."""
        prompt, tokens = self.end_run(llm)
        for eos in (frozenset({tokens[3], 198, 199}), tokens[3]):
            ending = make_llm(tiny_llama_path, eos=eos)
            [output] = ending.generate([prompt], SamplingParams(temperature=0.0), use_tqdm=False)
            assert (output.token_ids, output.finish_reason) == (tokens[:4], "stop")
            [output] = ending.generate([prompt], greedy(10), use_tqdm=False)
            assert (output.token_ids, output.finish_reason) == (tokens, "length")
            [output] = ending.generate([[tokens[3], *prompt]], greedy(4), use_tqdm=False)
            assert len(output.token_ids) == 4, "an end id inside the prompt stops nothing"

    def test_end_ids_are_the_union_of_all_sources(self, tiny_llama_path):
        llm = make_llm(tiny_llama_path, eos=frozenset({190}))
        assert llm.config.eos == {190} | llm.engine.model_config.eos_token_ids | llm.tokenizer.eos_token_ids

    def test_stop_id_ends_with_or_without_ignore_eos(self, llm):
        prompt, tokens = self.end_run(llm)
        [output] = llm.generate([prompt], greedy(10, stop_token_ids=[tokens[3]]), use_tqdm=False)
        assert (output.token_ids, output.finish_reason) == (tokens[:4], "stop")

    def test_no_end_before_min_tokens(self, llm):
        prompt, tokens = self.end_run(llm)
        params = greedy(10, stop_token_ids=[tokens[3]], min_tokens=6)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert len(output.token_ids) >= 6
        assert output.token_ids[:3] == tokens[:3]
        assert tokens[3] not in output.token_ids[:5]

    def test_stop_id_outside_the_vocabulary_is_refused(self, llm):
        for stop_token_id in (512, 2**31, 2**40):
            with pytest.raises(ValueError, match=rf"{stop_token_id}.*vocabulary of 512"):
                llm.add_request([1], greedy(stop_token_ids=[stop_token_id], min_tokens=1))

    def test_too_many_ids_to_hold_back_are_refused(self, llm):
        with pytest.raises(ValueError, match="min_tokens=1 with 20 end ids"):
            llm.add_request([1], greedy(stop_token_ids=range(20), min_tokens=1))


class TestAbort:
    def test_aborted_request_returns_what_it_had_and_frees_its_blocks(self, llm):
        keep, drop = llm.add_request([1, 2, 3], greedy(6)), llm.add_request([4, 5], greedy(6))
        llm.step()
        llm.step()
        output = llm.abort(drop)
        assert (output.finish_reason, len(output.token_ids)) == ("abort", 2)
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert [(o.request_id, len(o.token_ids)) for o in outputs] == [(keep, 6)]
        assert_all_blocks_free(llm)

    def test_abort_of_a_finished_or_unknown_request_is_none(self, llm):
        assert llm.abort(10**9) is None

    def test_interrupted_generate_leaves_nothing_behind(self, llm, monkeypatch):
        fail_at(monkeypatch, llm, step=3, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [9] * 11], greedy(9), use_tqdm=False)
        assert llm.is_finished()
        assert_all_blocks_free(llm)

    @pytest.mark.parametrize("call", [1, 2])
    @pytest.mark.parametrize(
        "place",
        [
            *("scheduler.schedule_ahead", "scheduler.advance", "scheduler.settle", "scheduler._finish"),
            *("block_manager.allocate", "block_manager.may_append", "block_manager.hash_blocks"),
            "block_manager.deallocate",
        ],
    )
    def test_an_interrupt_amid_the_books_leaves_them_balanced(self, llm, monkeypatch, place, call):
        prompts = [[1, 2, 3], [9] * 11, [5] * 7]
        expected = [output.token_ids for output in llm.generate(prompts, greedy(9), use_tqdm=False)]
        owner, name = place.split(".")
        target = llm.engine.scheduler if owner == "scheduler" else llm.engine.scheduler.block_manager
        method, calls = getattr(target, name), []

        def interrupted(*args):
            calls.append(args)
            if len(calls) == call:
                raise KeyboardInterrupt
            return method(*args)

        with monkeypatch.context() as patch:
            patch.setattr(target, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, greedy(9), use_tqdm=False)
        assert len(calls) >= call
        assert llm.is_finished()
        assert_all_blocks_free(llm)
        again = llm.generate(prompts, greedy(9), use_tqdm=False)
        assert [output.token_ids for output in again] == expected

    def test_generate_interrupted_while_it_queues_leaves_no_request(self, llm, monkeypatch):
        add, added = llm.engine.add, []

        def add_one_only(seq):
            if added:
                raise KeyboardInterrupt
            added.append(add(seq))
            return added[-1]

        monkeypatch.setattr(llm.engine, "add", add_one_only)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [9] * 11], greedy(9), use_tqdm=False)
        assert added
        assert llm.is_finished()
        assert not llm._inboxes


def fail_at(monkeypatch, llm, *, step, error, lose_cache=False):
    """Makes the step of that number fail, before or after the device has taken the cache along."""
    runner, calls = llm.engine.model_runner, []
    dispatch = runner.dispatch

    def dispatch_or_fail(*args):
        calls.append(args)
        if len(calls) != step:
            return dispatch(*args)
        if lose_cache:
            for pool in runner._kv_cache:
                pool.delete()
        raise error("planted")

    monkeypatch.setattr(runner, "dispatch", dispatch_or_fail)


@pytest.fixture(scope="module")
def small(tiny_llama_path):
    """So few blocks that sequences are preempted all the time."""
    return make_llm(tiny_llama_path, num_kvcache_blocks=14)


class TestOverlap:
    def test_tokens_are_the_same_with_steps_in_turn(self, small, prompts):
        rng = np.random.default_rng(2)
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.9])),
                max_tokens=int(rng.integers(1, 14)),
                ignore_eos=True,
                stop_token_ids=rng.integers(0, VOCAB, 20).tolist(),
                seed=i,
            )
            for i in range(len(prompts))
        ]
        tokens = {}
        for overlapped in (False, True):
            forget(small)
            switch(small, overlapped)
            tokens[overlapped] = [
                (o.token_ids, o.finish_reason) for o in small.generate(prompts, params, use_tqdm=False)
            ]
            assert_all_blocks_free(small)
        assert tokens[False] == tokens[True]
        assert {reason for _, reason in tokens[True]} == {"stop", "length"}

    def test_a_step_is_under_way_when_step_returns(self, llm):
        switch(llm, True)
        llm.add_request([1, 2, 3], greedy(4))
        before = llm.stats.num_steps
        for num_known in (1, 2, 3):
            llm.step()
            [seq] = llm.engine.scheduler.running
            assert (len(seq.completion_token_ids), seq.num_pending_tokens) == (num_known, 1)
        assert [len(output.token_ids) for output in llm.step()] == [4]
        assert llm.is_finished()
        assert llm.stats.num_steps - before == 4

    def test_abort_of_a_step_under_way_drops_its_token(self, llm):
        switch(llm, True)
        request_id = llm.add_request([1, 2, 3], greedy(9))
        llm.step()
        output = llm.abort(request_id)
        assert len(output.token_ids) == 1
        assert llm.is_finished()
        assert_all_blocks_free(llm)
        assert run(llm, [[1, 2, 3]], greedy(4))[0][:1] == output.token_ids


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("lose_cache", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_requests_outlive_a_step_that_fails(llm, monkeypatch, step, lose_cache, overlapped):
    switch(llm, overlapped)
    prompts = random_prompts([9, 1, 150 - 40], vocab_size=VOCAB, seed=11)
    alone = [solo(llm, prompt, greedy(8)) for prompt in prompts]
    forget(llm)
    fail_at(monkeypatch, llm, step=step, error=RuntimeError, lose_cache=lose_cache)
    ids = [llm.add_request(prompt, greedy(8)) for prompt in prompts]
    outputs = {}
    num_failures = 0
    while not llm.is_finished():
        try:
            outputs |= {output.request_id: output.token_ids for output in llm.step()}
        except RuntimeError:
            num_failures += 1
            llm.engine.scheduler.block_manager.check_integrity([])
    assert num_failures == 1
    assert [outputs[i] for i in ids] == alone
    assert_all_blocks_free(llm)


def test_after_warm_up_nothing_compiles(tiny_llama_path):
    """Fault case 15: 500 mixed requests, greedy and sampled, batches of every size, chunks, prefix hits."""
    llm = make_llm(
        tiny_llama_path,
        enforce_eager=False,
        forbid_recompile=True,
        max_num_batched_tokens=64,
        token_buckets=(),
    )
    runner = llm.engine.model_runner
    assert runner.num_programs == runner.num_buckets
    rng = np.random.default_rng(0)
    prompts = random_prompts(rng.integers(1, 100, 500), vocab_size=VOCAB)
    prompts = [prompts[i - 1] if i % 7 == 6 else prompt for i, prompt in enumerate(prompts)]
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])),
            top_k=int(rng.choice([-1, 5])),
            top_p=float(rng.choice([1.0, 0.9])),
            max_tokens=int(rng.integers(1, 12)),
            min_tokens=int(rng.integers(0, 2)),
        )
        for _ in prompts
    ]
    before = compile_count()
    for prompt, p in zip(prompts, params, strict=True):
        llm.add_request(prompt, p)
        if rng.random() < 0.5:
            llm.step()
    while not llm.is_finished():
        llm.step()
    assert (compile_count() - before).num_requests == 0
    assert runner.num_programs == runner.num_buckets
    assert_all_blocks_free(llm)
