"""Which sequences run in the next step, and what becomes of them after it."""

from collections import deque
from collections.abc import Collection
from typing import Protocol

from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.sequence import Sequence, SequenceStatus
from jaxvllm.engine.step import ScheduledStep
from jaxvllm.outputs import FinishReason


class SchedulerConfig(Protocol):
    """What the scheduler reads of `EngineConfig`."""

    @property
    def max_num_seqs(self) -> int: ...  # sequences per step

    @property
    def max_num_batched_tokens(self) -> int: ...  # tokens per prefill step

    @property
    def eos(self) -> int | Collection[int]: ...  # end ids of the model; -1 for none

    @property
    def kvcache_block_size(self) -> int: ...  # tokens per block

    @property
    def num_kvcache_blocks(self) -> int: ...  # blocks in the pool


class Scheduler:
    """Chooses the sequences of each step: prefill before decode, first come, first served.

    A sequence is in `waiting` until its whole prompt has been scheduled, then in `running`, then in neither.
    It holds blocks while it runs, and after a part of its prompt at the head of `waiting`. When blocks run
    out, the youngest running sequence goes back to the head of `waiting` and computes its tokens again.

    A sequence that the pool can never hold must be refused before `add`: see `max_seq_tokens`.

    `schedule` and `postprocess` take turns, and decide as NanoVLLM's. `postprocess` is `advance` and `settle` in one
    call. To keep the device busy, call `advance` as soon as the device has the step; then `schedule_ahead` chooses the
    next one without its ids, and `settle` takes them when they come. What depends on an id (an end, the hash of a
    generated block, the blocks that an end frees) then comes one step later.
    """

    def __init__(self, config: SchedulerConfig):
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.eos = config.eos
        self.block_size = config.kvcache_block_size
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self._eos_ids = frozenset({config.eos} if isinstance(config.eos, int) else config.eos)

    @property
    def max_seq_tokens(self) -> int:
        """Tokens, prompt and completion, of the longest sequence that can finish; see `BlockManager`."""
        return self.block_manager.max_seq_tokens

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence):
        self.waiting.append(seq)

    def schedule(self) -> ScheduledStep:
        """Returns the next step: a prefill where one can be admitted, else a decode.

        Its sequences have their blocks and `num_scheduled_tokens`; call `postprocess` when it has run.
        There must be something to do (`not is_finished()`).
        """
        seqs = self._schedule_prefill()
        if seqs:
            return ScheduledStep.of(seqs, "prefill")
        seqs = self._schedule_decode()
        assert seqs, f"{len(self.waiting)} sequences wait, none fits: was one above max_seq_tokens added?"
        return ScheduledStep.of(seqs, "decode")

    def preempt(self, seq: Sequence):
        """Takes the blocks of a sequence already out of `running`; it will be the next to be admitted."""
        seq.status = SequenceStatus.WAITING
        seq.is_prefill = True
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int], is_prefill: bool):
        """Takes the step's sampled ids, one per sequence, and ends the sequences that are done.

        The id of a sequence whose prompt is not complete yet is dropped, as is that of one aborted meanwhile.
        """
        step = ScheduledStep.of(seqs, "prefill" if is_prefill else "decode")
        self.advance(step)
        self.settle(step, token_ids)

    def abort(self, seq: Sequence):
        """Ends a sequence and frees its blocks, wherever it stands; one that has finished stays as it is.

        It may be part of a step in flight: its blocks are free at once, the steps that reuse them run later.
        """
        if seq.is_finished:
            return
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(seq)
        self._finish(seq, "abort")

    def restart(self, seqs: list[Sequence]):
        """After a step that failed or was interrupted: the unfinished `seqs` compute again, in this order.

        Block state may be inconsistent, so the block manager is rebuilt: every block is free, no prefix is cached.
        """
        self.block_manager = BlockManager(len(self.block_manager.blocks), self.block_size)
        self.running.clear()
        self.waiting = deque(seqs)
        for seq in seqs:
            seq.start_over()
            if seq.num_completion_tokens and self._reason_to_finish(seq) is not None:
                seq.drop_last_token()  # interrupted before it could end: the same token will come again

    def schedule_ahead(self) -> ScheduledStep | None:
        """As `schedule`, while a step is under way; None where it takes that step's ids to decide.

        That is where every running sequence may have ended, and where blocks are so few that one had to be preempted.
        """
        seqs = self._schedule_prefill()
        if seqs:
            return ScheduledStep.of(seqs, "prefill")
        if self._num_blocks_to_decode() > len(self.block_manager.free_block_ids):
            return None
        seqs = self._schedule_decode()
        return ScheduledStep.of(seqs, "decode") if seqs else None

    def advance(self, step: ScheduledStep):
        """Accounts for a step that the device has been given; the tokens that it samples become pending.

        The blocks that a prefill fills can be found at once: a step that finds them runs after it.
        """
        is_prefill = step.is_prefill
        for row, (seq, is_sampled) in enumerate(zip(step.seqs, step.is_sampled, strict=True)):
            if seq.status is SequenceStatus.FINISHED:  # aborted since it was scheduled
                continue
            if is_prefill:
                self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if is_sampled:
                seq.append_pending(row)

    def settle(self, step: ScheduledStep, token_ids: list[int]):
        """Takes the ids of a step after `advance`, and ends the sequences that are done.

        The ids of a sequence that ended meanwhile, at its previous token or by `abort`, are dropped.
        """
        any_finished = False
        block_size, is_prefill = self.block_size, step.is_prefill
        rows = zip(step.seqs, step.starts, step.is_sampled, token_ids, strict=True)
        for seq, start, is_sampled, token_id in rows:
            if seq.status is SequenceStatus.FINISHED or not is_sampled:
                continue
            if not is_prefill and (start + 1) % block_size == 0:
                self.block_manager.hash_block(seq, start // block_size)
            seq.resolve_pending(token_id)
            any_finished |= self._finish_if_done(seq)
        if any_finished:
            self._drop_finished()

    def _schedule_prefill(self) -> list[Sequence]:
        """Admits in order while tokens and blocks last; only the first one may run a part of its tokens."""
        seqs: list[Sequence] = []
        remaining = self.max_num_batched_tokens
        while self.waiting and remaining and len(seqs) < self.max_num_seqs:
            seq = self.waiting[0]
            num_cached_blocks = -1
            if seq.block_table:
                num_tokens = seq.num_tokens - seq.num_cached_tokens
            else:
                num_cached_blocks = self.block_manager.can_allocate(seq)
                if num_cached_blocks == -1:
                    break
                num_tokens = seq.num_tokens - num_cached_blocks * self.block_size
            if num_tokens > remaining and seqs:
                break
            if not seq.block_table:
                self.block_manager.allocate(seq, num_cached_blocks)
            seq.num_scheduled_tokens = min(num_tokens, remaining)
            remaining -= seq.num_scheduled_tokens
            if seq.num_scheduled_tokens == num_tokens:
                seq.status = SequenceStatus.RUNNING
                self.running.append(self.waiting.popleft())
            seqs.append(seq)
        return seqs

    def _schedule_decode(self) -> list[Sequence]:
        """One token for each running sequence, in order, making room at the expense of the youngest."""
        seqs: list[Sequence] = []
        ending: list[Sequence] = []  # their last token is pending
        while self.running and len(seqs) < self.max_num_seqs:
            seq = self.running.popleft()
            if seq.num_pending_tokens and seq.has_all_tokens:
                ending.append(seq)
            elif self._make_room(seq):
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                seq.is_prefill = False
                seqs.append(seq)
        self.running.extendleft(reversed(seqs))
        self.running.extendleft(reversed(ending))
        return seqs

    def _num_blocks_to_decode(self) -> int:
        """Blocks that the running sequences begin with their next token."""
        return sum(seq.num_tokens % self.block_size == 1 and not seq.has_all_tokens for seq in self.running)

    def _make_room(self, seq: Sequence) -> bool:
        """Preempts until the pool has a slot for one more token; False when `seq` itself had to give way."""
        while not self.block_manager.can_append(seq):
            if not self.running:
                self.preempt(seq)
                return False
            self.preempt(self.running.pop())
        return True

    def _reason_to_finish(self, seq: Sequence) -> FinishReason | None:
        """Why its last token ends it, or None."""
        num_completion_tokens = seq.num_completion_tokens
        token_id = seq.last_token
        is_end = (token_id in self._eos_ids and not seq.ignore_eos) or token_id in seq.stop_token_ids
        if is_end and num_completion_tokens >= seq.min_tokens:
            return "stop"
        return "length" if num_completion_tokens >= seq.max_tokens else None

    def _finish_if_done(self, seq: Sequence) -> bool:
        reason = self._reason_to_finish(seq)
        if reason is None:
            return False
        self._finish(seq, reason)
        return True

    def _drop_finished(self):
        """One pass for all of them: removing each by itself would search the queue each time."""
        self.running = deque(seq for seq in self.running if seq.status is not SequenceStatus.FINISHED)

    def _finish(self, seq: Sequence, reason: FinishReason):
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.num_scheduled_tokens = 0
        seq.drop_pending()
        self.block_manager.deallocate(seq)
