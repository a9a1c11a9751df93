"""What travels through the engine: a step on its way down to the device, the new tokens on their way up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from jaxvllm.engine.sequence import Sequence
from jaxvllm.outputs import FinishReason

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What `Scheduler.schedule` chose, as it stood then: read by the model runner, closed by `Scheduler.settle`.

    Of `seqs[i]` the step runs `num_new[i]` tokens from position `starts[i]` on. A decode runs one token per sequence.
    """

    seqs: list[Sequence]
    phase: Phase
    starts: list[int]  # position of the first token that it runs, per sequence
    num_new: list[int]  # tokens that it runs, per sequence
    is_sampled: list[bool]  # False where a later step runs the rest of the prompt: the sampled id means nothing

    @classmethod
    def of(cls, seqs: list[Sequence], phase: Phase) -> Self:
        """Describes sequences whose `num_scheduled_tokens` are set."""
        starts = [seq.num_cached_tokens for seq in seqs]
        if phase == "decode":
            return cls(seqs, phase, starts, [1] * len(seqs), [True] * len(seqs))
        num_new = [seq.num_scheduled_tokens for seq in seqs]
        rows = zip(seqs, starts, num_new, strict=True)
        return cls(seqs, phase, starts, num_new, [start + new >= seq.num_tokens for seq, start, new in rows])

    @property
    def is_prefill(self) -> bool:
        return self.phase == "prefill"

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs, of all its sequences."""
        return sum(self.num_new)

    def __iter__(self) -> Iterator:
        """Unpacks as what NanoVLLM's `schedule` returns: `seqs, is_prefill = scheduler.schedule()`."""
        return iter((self.seqs, self.is_prefill))


class TokenEvent(NamedTuple):
    """The new tokens of one request, and why it ended if it did."""

    seq: Sequence
    new_ids: list[int]  # empty where a request ends without a new token
    finish_reason: FinishReason | None
