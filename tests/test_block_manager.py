import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from fake_device import admit, run_tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.sequence import Sequence

_HASH_OF_1234 = 0x73F859A04F669E6D


# hashes


@pytest.mark.parametrize(
    "token_ids",
    [[1, 2, 3, 4], *(np.array([1, 2, 3, 4], dtype) for dtype in ("<i4", "<i8", ">i4", ">i8", "uint32"))],
    ids=["list", "int32", "int64", "big-endian int32", "big-endian int64", "uint32"],
)
def test_hash_bytes_are_little_endian_int64_whatever_holds_the_ids(token_ids):  # fault 18
    assert BlockManager.compute_hash(token_ids) == _HASH_OF_1234


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_do_not_depend_on_pythonhashseed(seed):  # fault 18
    code = "from jaxvllm.engine.block_manager import BlockManager; print(BlockManager.compute_hash([1, 2, 3, 4]))"
    env = {**os.environ, "PYTHONHASHSEED": seed}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(result.stdout) == _HASH_OF_1234


def test_a_hash_covers_the_prefix_in_front_of_the_tokens():
    prefix = 2**64 - 2
    expected = xxhash.xxh64(prefix.to_bytes(8, "little") + struct.pack("<2q", 7, 150_000)).intdigest()
    assert BlockManager.compute_hash([7, 150_000], prefix) == expected
    assert BlockManager.compute_hash([7, 150_000]) != expected


def test_a_prefix_of_zero_is_a_prefix():
    assert BlockManager.compute_hash([1], 0) != BlockManager.compute_hash([1], -1)


# limits


@pytest.mark.parametrize("block_size", [1, 0, -4])
def test_a_block_size_below_two_is_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size={block_size} is below 2"):
        BlockManager(8, block_size)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} is below 1"):
        BlockManager(num_blocks, 4)


def test_the_longest_sequence_fills_the_pool_and_samples_one_more():
    assert BlockManager(4, 4).max_seq_tokens == 17


def test_a_prompt_as_large_as_the_pool_fits_and_a_larger_one_does_not():
    manager = BlockManager(4, 4)
    assert manager.can_allocate(Sequence(range(16), block_size=4)) == 0
    assert manager.can_allocate(Sequence(range(17), block_size=4)) == -1


# prefix cache


@pytest.mark.parametrize("num_tokens", [4, 8, 7, 9])
def test_a_prompt_seen_before_still_computes_a_token(num_tokens):  # fault 2
    manager = BlockManager(8, 4)
    first = admit(manager, range(num_tokens))
    second = admit(manager, range(num_tokens), run=False)
    assert second.num_cached_tokens == (num_tokens - 1) // 4 * 4
    assert second.num_cached_tokens < num_tokens
    assert second.num_cached_prompt_tokens == second.num_cached_tokens
    num_shared = second.num_cached_tokens // 4
    assert second.block_table[:num_shared] == first.block_table[:num_shared]
    assert second.block_table[num_shared] not in first.block_table
    manager.check_integrity([first, second])


def test_a_free_block_is_found_again_until_someone_else_gets_it():
    manager = BlockManager(3, 4)
    seq = admit(manager, range(9))
    manager.deallocate(seq)
    assert list(manager.free_block_ids) == [2, 1, 0]
    again = Sequence(range(9), block_size=4)
    assert manager.can_allocate(again) == 2
    manager.deallocate(admit(manager, range(100, 105)))  # takes the tail's two blocks
    assert manager.can_allocate(again) == 1
    manager.deallocate(admit(manager, range(200, 212)))
    assert manager.can_allocate(again) == 0


def test_freed_chains_are_evicted_tail_first():
    manager = BlockManager(6, 4)
    seq = admit(manager, range(21))
    manager.deallocate(seq)
    found = []
    for token_id in range(90, 96):  # each takes one block
        admit(manager, [token_id])
        found.append([chain_hash in manager.hash_to_block_id for chain_hash in seq.block_hashes])
    assert found == [[True] * n + [False] * (5 - n) for n in (5, 4, 3, 2, 1, 0)]


def test_blocks_that_others_hold_need_no_free_ones():
    manager = BlockManager(4, 4)
    first = admit(manager, range(9))  # three blocks, two of them full
    assert manager.can_allocate(Sequence([*range(8), 50], block_size=4)) == 2
    assert manager.can_allocate(Sequence([*range(8), 50, 51, 52, 53, 54], block_size=4)) == -1
    second = admit(manager, [*range(8), 50])
    assert [manager.blocks[block_id].ref_count for block_id in second.block_table] == [2, 2, 1]
    manager.check_integrity([first, second])
    manager.deallocate(first)
    manager.check_integrity([second])
    manager.deallocate(second)
    manager.check_integrity([])


def test_cached_blocks_that_nobody_holds_take_free_ones():
    manager = BlockManager(4, 4)
    manager.deallocate(admit(manager, range(9)))
    admit(manager, [90], run=False)  # of the free blocks, the one never used
    assert manager.can_allocate(Sequence(range(12), block_size=4)) == 2
    assert manager.can_allocate(Sequence(range(13), block_size=4)) == -1


def test_equal_hashes_over_other_tokens_are_told_apart(monkeypatch):
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=-1: 1))
    manager = BlockManager(3, 4)
    first = admit(manager, range(5))
    assert manager.can_allocate(Sequence(range(5), block_size=4)) == 1
    assert manager.can_allocate(Sequence(range(4), block_size=4)) == 0
    # by hash alone it shares a block and fits; by content it needs two, and one is free
    other = Sequence(range(50, 55), block_size=4)
    assert manager.can_allocate(other) == -1
    manager.deallocate(first)
    assert manager.can_allocate(other) == 0


def test_a_newer_block_with_the_same_content_takes_the_hash_over():
    manager = BlockManager(5, 4)
    first = admit(manager, range(5), run=False)
    second = admit(manager, range(5), run=False)  # admitted before the first had run: nothing to share
    run_tokens(manager, first)
    run_tokens(manager, second)
    (chain_hash,) = manager.hash_to_block_id
    assert manager.hash_to_block_id[chain_hash] == second.block_table[0]
    manager.deallocate(first)
    reused = admit(manager, range(90, 99), run=False)
    assert first.block_hashes == [chain_hash]
    assert set(reused.block_table) == {4, 1, 0}  # the older block is gone, the newer one is still found
    assert manager.can_allocate(Sequence(range(5), block_size=4)) == -1
    manager.deallocate(reused)
    assert manager.can_allocate(Sequence(range(5), block_size=4)) == 1


def test_a_block_is_indexed_only_when_all_its_tokens_haverun_tokens():
    manager = BlockManager(4, 4)
    seq = admit(manager, range(10), run=False)
    assert manager.hash_to_block_id == {}
    for num_scheduled_tokens, num_indexed in [(3, 0), (1, 1), (2, 1), (4, 2)]:
        seq.num_scheduled_tokens = num_scheduled_tokens
        manager.hash_blocks(seq)
        seq.num_cached_tokens += num_scheduled_tokens
        assert len(manager.hash_to_block_id) == num_indexed
    assert [manager.blocks[i].token_ids for i in seq.block_table] == [[0, 1, 2, 3], [4, 5, 6, 7], []]


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_a_decode_step_adds_a_block_only_for_the_first_token_of_one(num_tokens):
    manager = BlockManager(2, 4)
    seq = admit(manager, range(num_tokens - 1))
    seq.append_token(9)
    assert manager.can_append(seq)
    manager.may_append(seq)
    assert len(seq.block_table) == seq.num_blocks
    manager.check_integrity([seq])


def test_without_a_free_block_only_the_last_block_can_grow():
    manager = BlockManager(1, 4)
    seq = admit(manager, range(3))
    seq.append_token(9)
    assert manager.can_append(seq)
    seq.append_token(9)
    assert not manager.can_append(seq)


def test_allocating_twice_is_our_own_mistake():
    manager = BlockManager(4, 4)
    seq = admit(manager, range(3))
    with pytest.raises(AssertionError, match="has blocks already"):
        manager.allocate(seq, 0)


# accounting


def _lost_block(manager, seq):
    del manager.free_block_ids[3]


def _block_free_and_used(manager, seq):
    manager.free_block_ids[seq.block_table[0]] = None


def _count_off(manager, seq):
    manager.blocks[seq.block_table[0]].ref_count += 1


def _indexed_under_another_hash(manager, seq):
    manager.hash_to_block_id[123] = seq.block_table[0]


def _indexed_and_not_full(manager, seq):
    block = manager.blocks[seq.block_table[0]]
    block.token_ids = block.token_ids[:2]


def _other_content(manager, seq):
    block = manager.blocks[seq.block_table[0]]
    block.token_ids = [9, 9, 9, 9]


def _unknown_id(manager, seq):
    manager.free_block_ids[77] = None


@pytest.mark.parametrize(
    "damage",
    [
        _lost_block,
        _block_free_and_used,
        _count_off,
        _indexed_under_another_hash,
        _indexed_and_not_full,
        _other_content,
        _unknown_id,
    ],
)
def test_check_integrity_notices(damage):
    manager = BlockManager(4, 4)
    seq = admit(manager, range(6))
    manager.check_integrity([seq])
    damage(manager, seq)
    with pytest.raises(AssertionError):
        manager.check_integrity([seq])


class BlockManagerMachine(RuleBasedStateMachine):
    """Any order of admissions, steps and releases that a scheduler could ask for, over a small alphabet."""

    live = Bundle("live")

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(7, 2)
        self.seqs: list[Sequence] = []

    @rule(target=live, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, token_ids):
        seq = Sequence(token_ids, block_size=2)
        num_cached_blocks = self.manager.can_allocate(seq)
        if num_cached_blocks >= 0:
            self.manager.allocate(seq, num_cached_blocks)
            assert seq.num_cached_tokens < seq.num_tokens
            assert len(seq.block_table) == seq.num_blocks
            self.seqs.append(seq)
        return seq

    @rule(seq=live, num_tokens=st.integers(1, 9))
    def run_chunk(self, seq, num_tokens):
        if seq in self.seqs:
            seq.num_scheduled_tokens = min(num_tokens, seq.num_tokens - seq.num_cached_tokens)
            self.manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens

    @rule(seq=live, token_id=st.integers(0, 1))
    def decode(self, seq, token_id):
        if seq in self.seqs and seq.num_cached_tokens == seq.num_tokens:
            seq.append_token(token_id)
            if self.manager.can_append(seq):
                self.manager.may_append(seq)
                self.run_chunk(seq, 1)
            else:
                self.release(seq)

    @rule(seq=consumes(live))
    def release(self, seq):
        if seq in self.seqs:
            self.seqs.remove(seq)
            self.manager.deallocate(seq)
            assert seq.block_table == []

    @precondition(lambda self: not self.seqs)
    @rule()
    def everything_is_free_when_nobody_is_left(self):
        assert len(self.manager.free_block_ids) == 7

    @invariant()
    def the_books_balance(self):
        self.manager.check_integrity(self.seqs)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
