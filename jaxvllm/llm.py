"""Text in, text out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxvllm.config import EngineConfig
from jaxvllm.engine.llm_engine import EngineStats, LLMEngine, StepResult
from jaxvllm.engine.sequence import Sequence as EngineSequence
from jaxvllm.models.loader import open_checkpoint, resolve_path
from jaxvllm.outputs import RequestOutput
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import Detokenizer, load_tokenizer

type Prompt = str | Sequence[int] | np.ndarray
type Message = Mapping[str, Any]


class LLM:
    """A model ready to generate: `LLM("Qwen/Qwen3-0.6B").generate("Hello")`.

    `model` is a Hugging Face folder, a GGUF file or a hub name; the options are the fields of `EngineConfig`.
    Everything that is wrong with a request raises `ValueError` before any of the call's requests is queued.
    """

    def __init__(self, model: str, *, use_tqdm: bool = True, **options: Any):
        config = EngineConfig.from_options(str(model), options)
        checkpoint = open_checkpoint(resolve_path(config.model))
        self.tokenizer = load_tokenizer(checkpoint)
        self.engine = LLMEngine(config, checkpoint, self.tokenizer.eos_token_ids, use_tqdm=use_tqdm)
        self._undelivered: list[RequestOutput] = []  # requests of add_request that ended inside a generate call

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
        encoded = [self._encode(prompt, f"prompt {i}: ") for i, prompt in enumerate(prompts)]
        for i, (token_ids, p) in enumerate(zip(encoded, params, strict=True)):
            try:
                self.engine.make_sequence(token_ids, p)
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}") from error
        request_ids = [self.engine.add_request(ids, p) for ids, p in zip(encoded, params, strict=True)]
        return self._run(request_ids, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the tokenizer's chat template.

        A message is `{"role": "user", "content": "..."}`. Raises `ValueError` where the model has no template.
        """
        if not messages:
            raise ValueError("messages is empty: give at least one message.")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Completes one prompt, yielding text as tokens come; half characters are held back until they are whole.

        Closing the iterator before its end aborts the request.
        """
        request_id = self.add_request(prompt, sampling_params)
        return self._stream(request_id)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its number; `step` returns its output when it ends."""
        return self.engine.add_request(self._encode(prompt), sampling_params or SamplingParams())

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs of the requests that ended."""
        outputs, self._undelivered = self._undelivered, []
        if not self.engine.is_finished():
            outputs += [self._output(seq) for seq in self.engine.step().finished]
        return outputs

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request at once, frees its blocks and returns what it had; None when it is not running."""
        seq = self.engine.abort(request_id)
        return None if seq is None else self._output(seq)

    def is_finished(self) -> bool:
        """Whether nothing is left for `step` to run or to return."""
        return self.engine.is_finished() and not self._undelivered

    def _run(self, request_ids: list[int], use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        remaining = set(request_ids)
        try:
            with tqdm(total=len(request_ids), desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as progress:
                while remaining:
                    for output in self._step_for(remaining)[1]:
                        outputs[output.request_id] = output
                        progress.update()
                    progress.set_postfix_str(_rates(self.stats), refresh=False)
        finally:
            for request_id in remaining:
                self.engine.abort(request_id)
        return [outputs[request_id] for request_id in request_ids]

    def _stream(self, request_id: int) -> Iterator[str]:
        remaining = {request_id}
        detokenizer = Detokenizer(self.tokenizer)
        try:
            while remaining:
                result, _ = self._step_for(remaining)
                for seq_id, token_id in result.new_tokens:
                    if seq_id == request_id and (text := detokenizer.feed(token_id)):
                        yield text
            if text := detokenizer.flush():
                yield text
        finally:
            for unfinished in remaining:
                self.engine.abort(unfinished)

    def _step_for(self, remaining: set[int]) -> tuple[StepResult, list[RequestOutput]]:
        """Runs a step, takes what ended out of `remaining` and returns it; others' outputs are kept for `step`."""
        result = self.engine.step()
        own = []
        for seq in result.finished:
            output = self._output(seq)
            (own if seq.seq_id in remaining else self._undelivered).append(output)
            remaining.discard(seq.seq_id)
        return result, own

    def _encode(self, prompt: Prompt, where: str = "") -> Sequence[int] | np.ndarray:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise ValueError(f"{where}the prompt is empty: give at least one token.")
        return self.tokenizer.encode(prompt)

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
    if not isinstance(prompts, (Sequence, np.ndarray)):
        raise ValueError(f"prompts={prompts!r}: a prompt is text or a list of token ids, prompts are a list of them.")
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        prompts = [prompts]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Sequence, np.ndarray)):
            raise ValueError(f"prompt {i} is {prompt!r}: a prompt is text or a list of token ids.")
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
