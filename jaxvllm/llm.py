"""Text in, text out."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxvllm.config import EngineConfig
from jaxvllm.engine.build import build_engine
from jaxvllm.engine.sequence import Sequence as EngineSequence
from jaxvllm.engine.stats import EngineStats
from jaxvllm.engine.step import TokenEvent
from jaxvllm.models import registry
from jaxvllm.models.checkpoint.loader import open_checkpoint, resolve_path
from jaxvllm.outputs import RequestOutput
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import Detokenizer, load_tokenizer

type Prompt = str | Sequence[int] | np.ndarray
type Message = Mapping[str, Any]


class LLM:
    """A model ready to generate: `LLM("Qwen/Qwen3-0.6B").generate("Hello")`.

    `model` is a Hugging Face folder, a GGUF file or a hub name; the options are the fields of `EngineConfig`.
    Everything that is wrong with a request raises `ValueError` before any of the call's requests is queued. Not for
    several threads at once: one thread drives an engine.
    """

    def __init__(self, model: str | os.PathLike[str], *, use_tqdm: bool = True, **options: Any):
        config = EngineConfig(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **options)
        checkpoint = open_checkpoint(resolve_path(config.model))
        registry.resolve(checkpoint.config.model_type)  # a folder that holds no model is refused as such, first of all
        self.tokenizer = load_tokenizer(checkpoint)
        self.engine = build_engine(config, checkpoint, self.tokenizer.eos_token_ids, use_tqdm=use_tqdm)
        self._inboxes: dict[int, list[TokenEvent]] = {}  # of generate and stream calls in progress, by request
        self._undelivered: list[RequestOutput] = []  # other requests that ended, for `step` to return

    @property
    def config(self) -> EngineConfig:
        """The options as settled for this checkpoint and device."""
        return self.engine.config

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes one prompt or several, each text or token ids; returns their outputs in the same order.

        `sampling_params` is one for all or one per prompt. Raises `ValueError`, naming the prompt, before anything
        runs. When it is interrupted, its unfinished requests are aborted.
        """
        prompts = _as_prompts(prompts)
        params = _as_params(sampling_params, len(prompts))
        seqs = []  # all are checked before the first is queued
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                seqs.append(self._make_sequence(prompt, p))
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from error
        return self._run(seqs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the tokenizer's chat template.

        A message is `{"role": "user", "content": "..."}`. Raises `ValueError` where the model has no template.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages={messages!r}: give a list of at least one message.")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Completes one prompt, yielding text as tokens come; half characters are held back until they are whole.

        Closing the iterator before its end aborts the request.
        """
        # made here, so that a bad prompt is refused at once; queued when the first text is asked for
        return self._stream(self._make_sequence(prompt, _as_params(sampling_params, 1)[0]))

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its number; `step` returns its output when it ends."""
        return self.engine.add(self._make_sequence(prompt, _as_params(sampling_params, 1)[0]))

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs of the requests that ended."""
        if not self.engine.is_finished():
            self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request at once, frees its blocks and returns what it had; None when it is not running."""
        seq = self.engine.abort(request_id)
        if seq is None:
            return None
        if request_id in self._inboxes:
            self._inboxes[request_id].append(TokenEvent(seq, [], seq.finish_reason))
        return self._output(seq)

    def is_finished(self) -> bool:
        """Whether nothing is left for `step` to run or to return."""
        return self.engine.is_finished() and not self._undelivered

    def _run(self, seqs: list[EngineSequence], use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        with (
            self._claim(seqs) as inbox,
            tqdm(total=len(seqs), desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as progress,
        ):
            while len(outputs) < len(seqs):
                if not inbox:
                    self._advance()
                for event in inbox:
                    if event.finish_reason is not None:
                        outputs[event.seq.seq_id] = self._output(event.seq)
                inbox.clear()
                progress.update(len(outputs) - progress.n)
                progress.set_postfix_str(_rates(self.stats), refresh=False)
            return [outputs[seq.seq_id] for seq in seqs]

    def _stream(self, seq: EngineSequence) -> Iterator[str]:
        detokenizer = Detokenizer(self.tokenizer)
        with self._claim([seq]) as inbox:
            is_finished = False
            while not is_finished:
                if not inbox:
                    self._advance()  # unless a step between two of our texts has brought tokens already
                events = inbox.copy()
                inbox.clear()
                is_finished = any(event.finish_reason is not None for event in events)
                if text := "".join(detokenizer.feed(token_id) for event in events for token_id in event.new_ids):
                    yield text
            if text := detokenizer.flush():
                yield text

    @contextmanager
    def _claim(self, seqs: list[EngineSequence]) -> Iterator[list[TokenEvent]]:
        """Queues requests and yields the list to which their events are appended.

        Those that have not ended when it leaves are aborted, also where it is interrupted while it queues.
        """
        request_ids: list[int] = []
        inbox: list[TokenEvent] = []
        try:
            for seq in seqs:
                request_ids.append(self.engine.add(seq))
                self._inboxes[request_ids[-1]] = inbox
            yield inbox
        finally:
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
                self.engine.abort(request_id)  # nothing, where it has ended

    def _advance(self):
        """Runs a step and hands its events to the calls that wait for them."""
        for event in self.engine.step():
            inbox = self._inboxes.get(event.seq.seq_id)
            if inbox is not None:
                inbox.append(event)
            elif event.finish_reason is not None:
                self._undelivered.append(self._output(event.seq))

    def _make_sequence(self, prompt: Prompt, params: SamplingParams) -> EngineSequence:
        if not isinstance(prompt, (str, Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise ValueError(f"{prompt!r} is no prompt: give text or a list of token ids.")
        if isinstance(prompt, str):
            # no ids for empty text, also where the tokenizer would begin it with one of its own: it is refused
            prompt = self.tokenizer.encode(prompt) if prompt else []
        return self.engine.make_sequence(prompt, params)

    def _output(self, seq: EngineSequence) -> RequestOutput:
        assert seq.finish_reason is not None
        token_ids = seq.completion_token_ids
        return RequestOutput(
            request_id=seq.seq_id,
            text=self.tokenizer.decode(token_ids),
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_prompt_tokens,
        )


def _as_prompts(prompts: object) -> list[Prompt]:
    """One prompt (text, or a list of ids) becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)) or (isinstance(prompts, np.ndarray) and not prompts.ndim):
        raise ValueError(f"prompts={prompts!r}: a prompt is text or a list of token ids, prompts are a list of them.")
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        prompts = [prompts]
    return list(prompts)


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"sampling_params={params!r}: give a SamplingParams for all prompts, or a list of them.")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one per prompt.")
    return list(params)


def _rates(stats: EngineStats) -> str:
    return f"Prefill={stats.prefill_tokens_per_s:.0f}tok/s, Decode={stats.decode_tokens_per_s:.0f}tok/s"
