"""One request as the scheduler sees it: its tokens, its blocks, its limits."""

from collections.abc import Iterable
from enum import Enum, auto

from jaxvllm.outputs import FinishReason
from jaxvllm.sampling_params import SamplingParams

_DEFAULT_PARAMS = SamplingParams()


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The tokens of one request and how far they have come.

    Tokens are only ever appended, so a hash in `block_hashes` stays valid, whatever happens to the blocks.

    A token that a step under way will sample is pending: it counts in `num_tokens`, since the next step can be
    scheduled with it, and has no id in `token_ids` yet. Nothing is ever pending without `async_scheduling`.
    """

    def __init__(
        self,
        token_ids: Iterable[int],
        sampling_params: SamplingParams = _DEFAULT_PARAMS,
        *,
        block_size: int,
        seq_id: int = 0,
    ):
        """`block_size` is that of the engine's pool. Raises `ValueError` on an empty prompt."""
        self.seq_id = seq_id
        self.block_size = block_size
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.token_ids = list(token_ids)
        if not self.token_ids:
            raise ValueError(f"sequence {seq_id} has an empty prompt: give at least one token.")
        self.last_token = self.token_ids[-1]
        self.num_tokens = len(self.token_ids)  # pending ones included
        self.num_pending_tokens = 0
        self.num_reported_tokens = 0  # new tokens that the engine has handed out as events
        self.pending_row = -1  # of the last pending token, among the ids that its step samples
        self.num_prompt_tokens = self.num_tokens
        self.num_cached_tokens = 0
        self.num_cached_prompt_tokens = 0  # found in the prefix cache when first admitted
        self.num_scheduled_tokens = 0
        self.is_prefill = True
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # chain hashes of the first full blocks, as far as needed so far
        self.sampling_params = sampling_params
        self.seed = sampling_params.seed or 0  # the engine settles a seed for a request that gives none
        self.temperature = sampling_params.temperature
        self.max_tokens = sampling_params.max_tokens
        self.min_tokens = sampling_params.min_tokens
        self.ignore_eos = sampling_params.ignore_eos
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids)
        self.packed_sampling = b""  # its constant part of a step's buffer: filled and read by `batch.py` only

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key):
        return self.token_ids[key]

    def __repr__(self) -> str:
        return (
            f"Sequence(seq_id={self.seq_id}, {self.status.name}, num_prompt_tokens={self.num_prompt_tokens}, "
            f"num_tokens={self.num_tokens}, num_cached_tokens={self.num_cached_tokens}, "
            f"num_scheduled_tokens={self.num_scheduled_tokens}, block_table={self.block_table})"
        )

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_completion_tokens(self) -> int:
        """New tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_all_tokens(self) -> bool:
        """Whether it will end with `max_tokens` once its pending tokens are known: nothing is left to schedule."""
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all its tokens, the last one perhaps in part."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in the last block, from 1 to block_size."""
        return (self.num_tokens - 1) % self.block_size + 1

    def block(self, i: int) -> list[int]:
        """Returns the token ids of its i-th block; the last one may be short."""
        assert 0 <= i < self.num_blocks, f"block {i} of {self.num_blocks}"
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int):
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    def append_pending(self, row: int):
        """Counts a token that a step under way samples, in row `row` of its ids."""
        self.num_tokens += 1
        self.num_pending_tokens += 1
        self.pending_row = row

    def resolve_pending(self, token_id: int):
        """Gives the first pending token its id."""
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_pending_tokens -= 1

    def start_over(self):
        """Forgets everything but its tokens, to compute them again."""
        self.status = SequenceStatus.WAITING
        self.is_prefill = True
        self.block_table = []
        self.num_tokens = len(self.token_ids)
        self.last_token = self.token_ids[-1]
        self.num_pending_tokens = self.num_cached_tokens = self.num_scheduled_tokens = 0

    def drop_last_token(self):
        self.token_ids.pop()
        self.last_token = self.token_ids[-1]
        self.num_tokens -= 1
        del self.block_hashes[self.num_tokens // self.block_size :]

    def drop_pending(self):
        """Forgets the pending tokens, whatever their steps will sample."""
        self.num_tokens -= self.num_pending_tokens
        self.num_pending_tokens = 0
