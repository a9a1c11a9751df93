from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.engine.sequence import Sequence, SequenceStatus
from jaxvllm.sampling_params import SamplingParams


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(2, 9))
def test_blocks_cut_the_tokens_without_gap_or_overlap(token_ids, block_size):
    seq = Sequence(token_ids, block_size=block_size)
    blocks = [seq.block(i) for i in range(seq.num_blocks)]
    assert list(chain.from_iterable(blocks)) == token_ids
    assert all(len(block) == block_size for block in blocks[:-1])
    assert len(blocks[-1]) == seq.last_block_num_tokens
    assert 1 <= seq.last_block_num_tokens <= block_size


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1)]
)
def test_block_counts_around_the_boundaries(num_tokens, num_blocks, last):
    seq = Sequence(range(num_tokens), block_size=4)
    assert (seq.num_blocks, seq.last_block_num_tokens) == (num_blocks, last)


@pytest.mark.parametrize("i", [-1, 2])
def test_a_block_outside_the_sequence_is_our_own_mistake(i):
    with pytest.raises(AssertionError, match="of 2"):
        Sequence(range(5), block_size=4).block(i)


def test_a_new_sequence_waits_with_nothing_computed():
    seq = Sequence([5, 6, 7], block_size=4, seq_id=9)
    assert (seq.seq_id, seq.status, seq.is_finished, seq.finish_reason) == (9, SequenceStatus.WAITING, False, None)
    assert (len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.last_token) == (3, 3, 3, 7)
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens, seq.num_cached_prompt_tokens) == (0, 0, 0)
    assert (seq.block_table, seq.is_prefill) == ([], True)


def test_appended_tokens_are_the_completion():
    seq = Sequence([5, 6, 7], block_size=4)
    seq.append_token(8)
    seq.append_token(9)
    assert seq.token_ids == [5, 6, 7, 8, 9]
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([5, 6, 7], [8, 9])
    assert (seq.num_tokens, seq.num_completion_tokens, seq.last_token) == (5, 2, 9)
    assert (seq[0], seq[-1], seq[1:3]) == (5, 9, [6, 7])


def test_the_callers_list_is_left_alone():
    prompt = [1, 2]
    seq = Sequence(prompt, block_size=4)
    seq.append_token(3)
    assert prompt == [1, 2]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="sequence 3 has an empty prompt"):
        Sequence([], block_size=4, seq_id=3)


def test_block_sizes_and_numbers_belong_to_the_sequence_not_to_the_class():
    small, large = Sequence(range(9), block_size=4), Sequence(range(9), block_size=8)
    assert (small.num_blocks, large.num_blocks) == (3, 2)
    assert not hasattr(Sequence, "block_size")
    assert not hasattr(Sequence, "counter")
    assert small.seq_id == large.seq_id == 0


def test_a_sequence_takes_its_limits_from_the_sampling_params():
    params = SamplingParams(
        temperature=0.5, max_tokens=7, min_tokens=2, ignore_eos=True, stop_token_ids=(3, 4), seed=11
    )
    seq = Sequence([1], params, block_size=4)
    assert seq.sampling_params is params
    assert (seq.temperature, seq.max_tokens, seq.min_tokens, seq.ignore_eos) == (0.5, 7, 2, True)
    assert (seq.stop_token_ids, seq.seed) == ({3, 4}, 11)
