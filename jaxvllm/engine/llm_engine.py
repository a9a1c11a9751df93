"""Serves requests: token ids in, events of new tokens out."""

import dataclasses
from collections.abc import Sequence as AnySequence
from time import perf_counter

import numpy as np

from jaxvllm.config import EngineConfig
from jaxvllm.engine.batch import MAX_BANNED_IDS, banned_ids
from jaxvllm.engine.model_runner import ModelRunner
from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.stats import EngineStats
from jaxvllm.engine.step import TokenEvent
from jaxvllm.engine.step_loop import StepLoop
from jaxvllm.models.config import ModelConfig
from jaxvllm.sampling_params import SamplingParams


class LLMEngine:
    """Serves requests of token ids; `build_engine` assembles one.

    What would crash or hang NanoVLLM's scheduler is refused or limited in `make_sequence`, so that the scheduler
    decides exactly as NanoVLLM's on everything that reaches it.

    With `async_scheduling` a step is scheduled and dispatched before the ids of the one before are read: at most one
    step is in flight when `step` returns. The tokens are the same; block decisions may lag by one step.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, runner: ModelRunner, stats: EngineStats):
        self.config = config
        self.model_runner = runner
        self.stats = stats
        self.loop = StepLoop(scheduler, runner, stats.times, is_ahead=config.async_scheduling)
        self._sequences: dict[int, Sequence] = {}  # not yet reported as ended, by seq_id
        self._unreported: list[Sequence] = []  # ended in a step that was interrupted after that
        self._num_requests = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def model_config(self) -> ModelConfig:
        return self.model_runner.model_config

    def make_sequence(self, token_ids: AnySequence[int] | np.ndarray, params: SamplingParams) -> Sequence:
        """Checks a request and returns its sequence, which `add` queues.

        `max_tokens` is cut to what `max_model_len` and the cache can hold: such a request ends with reason "length".
        Raises `ValueError` for a prompt that is empty, holds an id outside the vocabulary, or leaves no room for one
        new token, and for stop ids that cannot be served.
        """
        prompt = self._checked_prompt(token_ids)
        vocab_size = self.model_config.vocab_size
        if any(stop_id >= vocab_size for stop_id in params.stop_token_ids):
            raise ValueError(
                f"stop_token_ids={params.stop_token_ids} goes past the model's vocabulary of {vocab_size} ids."
            )
        banned = banned_ids(params.stop_token_ids, params.ignore_eos, self.config.eos_ids)
        if params.min_tokens and len(banned) > MAX_BANNED_IDS:
            raise ValueError(
                f"min_tokens={params.min_tokens} with {len(banned)} end ids and stop ids: at most {MAX_BANNED_IDS} "
                "can be held back, give fewer stop_token_ids."
            )
        room = min(self.config.max_model_len, self.scheduler.max_seq_tokens) - len(prompt)
        settled = dataclasses.replace(
            params, max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room)
        )
        return Sequence(prompt, settled, block_size=self.config.kvcache_block_size)

    def add(self, seq: Sequence) -> int:
        """Queues a sequence of `make_sequence`; assigns and returns its request id, and sets a seed if it has none."""
        seq.seq_id = self._num_requests
        self._num_requests += 1
        if seq.sampling_params.seed is None:
            seq.seed = self._default_seed(seq.seq_id)
        self._sequences[seq.seq_id] = seq
        self.scheduler.add(seq)
        return seq.seq_id

    def step(self) -> list[TokenEvent]:
        """Takes the ids of one step; returns an event for each request that has new tokens or ended.

        There must be a request (`not is_finished()`). When running the step fails or is interrupted, no request
        is lost: all compute again from the next step on, and no token is reported twice.
        """
        start = perf_counter()
        seqs, self._unreported = self._unreported, []
        try:
            if self.scheduler.is_finished():
                return self._events(seqs)
            step = self.loop.run_step()
            events = self._events([*seqs, *step.seqs])
            self.stats.count_step(step, sum([len(event.new_ids) for event in events]), perf_counter() - start)
            return events
        except BaseException:
            self.loop.drop_step_in_flight()
            self.model_runner.restore_cache()
            self._unreported = [seq for seq in self._sequences.values() if seq.is_finished]
            self.scheduler.restart([seq for seq in self._sequences.values() if not seq.is_finished])
            raise

    def abort(self, seq_id: int) -> Sequence | None:
        """Ends a request and frees its blocks; returns its sequence, or None when it is not (or no longer) here."""
        seq = self._sequences.pop(seq_id, None)
        if seq is not None:
            self.scheduler.abort(seq)
        return seq

    def is_finished(self) -> bool:
        """Whether every request has been reported as ended, or aborted."""
        return not self._sequences

    def _events(self, seqs: list[Sequence]) -> list[TokenEvent]:
        """The news of some requests since they were last reported; those that have none are left out."""
        events = []
        for seq in seqs:
            if seq.seq_id not in self._sequences:  # aborted, or reported as ended
                continue
            new_ids = seq.token_ids[seq.num_prompt_tokens + seq.num_reported_tokens :]
            if new_ids or seq.is_finished:
                events.append(TokenEvent(seq, new_ids, seq.finish_reason))
                seq.num_reported_tokens += len(new_ids)
            if seq.is_finished:
                del self._sequences[seq.seq_id]
        return events

    def _checked_prompt(self, token_ids: AnySequence[int] | np.ndarray) -> list[int]:
        if isinstance(token_ids, np.ndarray) and token_ids.ndim != 1:
            raise ValueError(f"the prompt is an array of shape {token_ids.shape}: token ids have one axis.")
        prompt = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token.")
        vocab_size = self.model_config.vocab_size
        for token_id in prompt:
            if not isinstance(token_id, (int, np.integer)) or isinstance(token_id, bool):
                raise ValueError(f"the prompt holds {token_id!r}: a prompt is text or a list of token ids.")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"token id {token_id} is outside the model's vocabulary of {vocab_size} ids.")
        limit = self.config.max_model_len - 1
        if len(prompt) > limit:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and max_model_len={self.config.max_model_len} leaves room for "
                f"{limit} and one new one: shorten it or raise max_model_len."
            )
        limit = self.scheduler.max_seq_tokens - 1
        if len(prompt) > limit:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and the KV cache's {self.config.num_kvcache_blocks} blocks of "
                f"{self.config.kvcache_block_size} hold {limit}: shorten it or raise num_kvcache_blocks."
            )
        return [int(token_id) for token_id in prompt]

    def _default_seed(self, seq_id: int) -> int:
        """A seed of its own for a request that gives none, the same in every run with the same engine seed."""
        return int(np.random.SeedSequence((self.config.seed, seq_id)).generate_state(1, np.uint64)[0])
