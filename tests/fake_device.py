"""A cache and a model for tests of the metadata layer: exact, cheap, and wrong as soon as a block is.

A slot holds what K and V of a token hold: something that depends on the token and on all before it. It is computed
from what the previous slot holds now, so a block given away too early, or found under a wrong hash, changes the
tokens that come out.
"""

import zlib
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from typing import NamedTuple

from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.step import ScheduledStep
from jaxvllm.engine.step_loop import StepLoop
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
    scheduler = CheckedScheduler(Config(**{"num_kvcache_blocks": 64, **config}))
    for seq in seqs:
        scheduler.add(seq)
    return scheduler


class FakeDevice:
    """A runner for `StepLoop`; `dispatch` has done everything when it returns."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, int] = {}
        self.ids: list[int] = []  # of the last step, where a pending token is found

    def dispatch(self, step: ScheduledStep) -> list[int]:
        """Writes the step's tokens of each sequence, then samples one token for each."""
        rows = list(zip(step.seqs, map(self._token_ids, step.seqs), step.starts, step.num_new, strict=True))
        for seq, token_ids, start, num_new in rows:
            for position in range(start, start + num_new):
                before = self.slots[self._slot(seq, position - 1)] if position else 0
                self.slots[self._slot(seq, position)] = _extend(before, token_ids[position])
        self.ids = [self._sample(seq, token_ids[: start + num_new]) for seq, token_ids, start, num_new in rows]
        return self.ids

    def is_done(self, ids: list[int]) -> bool:
        return True

    def read(self, ids: list[int], num_seqs: int) -> list[int]:
        assert len(ids) == num_seqs
        return ids

    def _token_ids(self, seq: Sequence) -> list[int]:
        return seq.token_ids + ([self.ids[seq.pending_row]] if seq.num_pending_tokens else [])

    def _sample(self, seq: Sequence, token_ids: list[int]) -> int:
        expected = 0
        for position, token_id in enumerate(token_ids):
            expected = _extend(expected, token_id)
            assert self.slots[self._slot(seq, position)] == expected, f"{seq}: position {position} is another's"
        return expected % VOCAB_SIZE

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size


class NoTimes:
    """A clock for `StepLoop` that stands still."""

    hidden_host_s = busy_s = 0.0

    def phase(self, name: str):
        return nullcontext()


class CheckedScheduler(Scheduler):
    """Checks the blocks after each change that a step makes."""

    def advance(self, step: ScheduledStep):
        super().advance(step)
        check_integrity(self)

    def settle(self, step: ScheduledStep, token_ids: list[int]):
        super().settle(step, token_ids)
        check_integrity(self)


def make_loop(scheduler: Scheduler, device: FakeDevice, *, is_ahead: bool = True) -> StepLoop:
    """The engine's own loop over the fake device."""
    return StepLoop(scheduler, device, NoTimes(), is_ahead=is_ahead)


def fail(loop: StepLoop):
    """As if the device had lost what it was doing."""
    loop.drop_step_in_flight()
    loop.scheduler.restart([*loop.scheduler.running, *loop.scheduler.waiting])


def run_step(scheduler: Scheduler, device: FakeDevice) -> tuple[list[Sequence], bool]:
    """One step, its ids read before the next is scheduled; returns what was scheduled."""
    step = make_loop(scheduler, device, is_ahead=False).run_step()
    check_integrity(scheduler)
    return step.seqs, step.is_prefill


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
