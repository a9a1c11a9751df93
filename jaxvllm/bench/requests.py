"""What the benchmarks ask of an engine: token ids in, a number of tokens out."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

_NANO_IDS = 10_000  # NanoVLLM's prompts are made of the vocabulary's first ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    token_ids: list[int]
    max_tokens: int  # all are generated: end ids are ignored
    temperature: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.max_tokens


def nano(vocab_size: int, count: int = 256, shortest: int = 100, longest: int = 1024) -> list[Request]:
    """NanoVLLM's own benchmark: random lengths in and out, sampled at 0.6, seed 0."""
    rng = Random(0)
    most = min(_NANO_IDS, vocab_size)
    prompts = [[rng.randrange(most) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]
    return [Request(token_ids=prompt, max_tokens=rng.randint(shortest, longest), temperature=0.6) for prompt in prompts]


def short(vocab_size: int, count: int = 32, max_tokens: int = 64) -> list[Request]:
    """Prompts of 32 to 255 random tokens, greedy, seed 0: what the peers are compared on."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(32, 256, count)
    return [Request(token_ids=rng.integers(0, vocab_size, n).tolist(), max_tokens=max_tokens) for n in lengths]


def single(vocab_size: int, max_tokens: int = 64) -> list[Request]:
    """One sequence alone: every token reads every weight."""
    return short(vocab_size, 1, max_tokens)


def shared_prefix(
    vocab_size: int, count: int = 64, shared: int = 1024, length: int = 1152, max_tokens: int = 8
) -> list[Request]:
    """Prompts of `length` random tokens with the same first `shared` ones."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, vocab_size, shared).tolist()
    tails = [rng.integers(0, vocab_size, length - shared).tolist() for _ in range(count)]
    return [Request(token_ids=prefix + tail, max_tokens=max_tokens) for tail in tails]


WORKLOADS: dict[str, Callable[[int], list[Request]]] = {"nano": nano, "short": short, "single": single}


def load(name: str, vocab_size: int, encode: Callable[[str], list[int]] | None) -> list[Request]:
    """Returns a workload by name, or those of a JSONL file.

    A line is `{"prompt": text or token ids, "max_tokens": n, "temperature": t}`, the last two with defaults of 64 and
    0. Raises ValueError naming the line that is none, and where text meets a model without a tokenizer.
    """
    if name in WORKLOADS:
        return WORKLOADS[name](vocab_size)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"workload {name!r} is none of {', '.join(WORKLOADS)}, and no file either.")
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                requests.append(_parse(json.loads(line), encode))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise ValueError(f"{path} holds no request.")
    return requests


def _parse(values: dict, encode: Callable[[str], list[int]] | None) -> Request:
    if unknown := values.keys() - {"prompt", "max_tokens", "temperature"}:
        raise ValueError(f"{sorted(unknown)[0]!r} is none of prompt, max_tokens, temperature.")
    prompt = values["prompt"]
    if isinstance(prompt, str):
        if encode is None:
            raise ValueError("a prompt of text needs a model with a tokenizer: give token ids.")
        prompt = encode(prompt)
    return Request(
        token_ids=[int(token_id) for token_id in prompt],
        max_tokens=int(values.get("max_tokens", 64)),
        temperature=float(values.get("temperature", 0.0)),
    )
