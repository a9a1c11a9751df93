"""A cache and a model for tests of the metadata layer: exact, cheap, and wrong as soon as a block is.

A slot holds what K and V of a token hold: something that depends on the token and on all before it. It is computed
from what the previous slot holds now, so a block given away too early, or found under a wrong hash, changes the
tokens that come out.
"""

import zlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.scheduler import Flight, Scheduler
from jaxvllm.engine.sequence import Sequence
from jaxvllm.sampling_params import SamplingParams

VOCAB_SIZE = 1000


class Config(NamedTuple):
    """What a scheduler reads of an engine's configuration."""

    num_kvcache_blocks: int
    kvcache_block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    eos: int | Collection[int] = -1


def make_seq(token_ids: Iterable[int], max_tokens: int = 4, *, seq_id=0, block_size=4, **params) -> Sequence:
    """A request that runs to its length unless `params` say otherwise."""
    params = {"ignore_eos": True, **params}
    return Sequence(token_ids, SamplingParams(max_tokens=max_tokens, **params), block_size=block_size, seq_id=seq_id)


def make_scheduler(*seqs: Sequence, **config) -> Scheduler:
    """A scheduler with these sequences added, and plenty of blocks unless `config` says otherwise."""
    scheduler = Scheduler(Config(**{"num_kvcache_blocks": 64, **config}))
    for seq in seqs:
        scheduler.add(seq)
    return scheduler


class FakeDevice:
    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, int] = {}

    def run(self, seqs: Iterable[Sequence], ids: list[int] | None = None) -> list[int]:
        """Writes the scheduled tokens of each sequence, then samples one token for each.

        `ids` are those of the step before, where a sequence's pending token is found.
        """
        seqs = list(seqs)
        tokens = [seq.token_ids + ([ids[seq.pending_row]] if ids and seq.num_pending_tokens else []) for seq in seqs]
        for seq, token_ids in zip(seqs, tokens, strict=True):
            start = seq.num_cached_tokens
            for position in range(start, start + seq.num_scheduled_tokens):
                before = self.slots[self._slot(seq, position - 1)] if position else 0
                self.slots[self._slot(seq, position)] = _extend(before, token_ids[position])
        return [self._sample(seq, token_ids) for seq, token_ids in zip(seqs, tokens, strict=True)]

    def _sample(self, seq: Sequence, token_ids: list[int]) -> int:
        num_visible = seq.num_cached_tokens + seq.num_scheduled_tokens
        expected = 0
        for position, token_id in enumerate(token_ids[:num_visible]):
            expected = _extend(expected, token_id)
            assert self.slots[self._slot(seq, position)] == expected, f"{seq}: position {position} is another's"
        return expected % VOCAB_SIZE

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size


def run_step(scheduler: Scheduler, device: FakeDevice) -> tuple[list[Sequence], bool]:
    """One step, with the books checked after it; returns what was scheduled."""
    seqs, is_prefill = scheduler.schedule()
    scheduler.postprocess(seqs, device.run(seqs), is_prefill)
    check_integrity(scheduler)
    return seqs, is_prefill


class Overlapped:
    """The loop that dispatches a step before it takes the ids of the one before."""

    def __init__(self, scheduler: Scheduler, device: FakeDevice):
        self.scheduler, self.device = scheduler, device
        self.under_way: tuple[Flight, list[int]] | None = None
        self.ids: list[int] = []
        self.num_ahead = 0

    def step(self):
        if self.under_way is None or all(seq.is_finished for seq in self.under_way[0].seqs):
            self.under_way = self._dispatch(*self.scheduler.schedule())
        ahead = self.scheduler.schedule_ahead()
        following = None if ahead is None else self._dispatch(*ahead)
        self.num_ahead += following is not None
        check_integrity(self.scheduler)
        self.scheduler.settle(*self.under_way)
        check_integrity(self.scheduler)
        self.under_way = following

    def fail(self):
        """As if the device had lost what it was doing."""
        self.under_way = None
        self.scheduler.restart([*self.scheduler.running, *self.scheduler.waiting])

    def _dispatch(self, seqs: list[Sequence], is_prefill: bool) -> tuple[Flight, list[int]]:
        self.ids = self.device.run(seqs, self.ids)
        return self.scheduler.advance(seqs, is_prefill), self.ids


def run_all(scheduler: Scheduler, device: FakeDevice, max_steps: int = 10_000) -> int:
    """Runs until nothing is left; returns the number of steps."""
    for num_steps in range(max_steps):
        if scheduler.is_finished():
            return num_steps
        run_step(scheduler, device)
    raise AssertionError(f"not finished after {max_steps} steps")


def check_integrity(scheduler: Scheduler):
    scheduler.block_manager.check_integrity([*scheduler.waiting, *scheduler.running])


def admit(manager: BlockManager, token_ids, *, run: bool = True) -> Sequence:
    """Allocates a sequence and, if `run`, accounts for a step over all its tokens."""
    seq = Sequence(token_ids, block_size=manager.block_size)
    num_cached_blocks = manager.can_allocate(seq)
    assert num_cached_blocks >= 0
    manager.allocate(seq, num_cached_blocks)
    if run:
        run_tokens(manager, seq)
    return seq


def run_tokens(manager: BlockManager, seq: Sequence):
    seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0


def solo_run(seq: Sequence, eos: int | Collection[int] = -1) -> Sequence:
    """The same request, finished: alone in a pool where nothing is shared, cut in chunks or preempted."""
    num_blocks = (seq.num_prompt_tokens + seq.max_tokens) // seq.block_size + 1
    scheduler = Scheduler(Config(num_blocks, seq.block_size, max_num_batched_tokens=1_000_000, eos=eos))
    alone = Sequence(seq.prompt_token_ids, seq.sampling_params, block_size=seq.block_size)
    scheduler.add(alone)
    run_all(scheduler, FakeDevice(seq.block_size))
    return alone


def solo_completion(seq: Sequence) -> list[int]:
    return solo_run(seq).completion_token_ids


def _extend(before: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(8, "little"), before)
