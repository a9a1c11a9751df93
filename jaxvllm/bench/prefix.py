"""`jaxvllm bench prefix`: requests that begin alike, with the prefix cache and without it."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxvllm.bench.machine import describe
from jaxvllm.bench.measure import Work, make_engine, run_requests
from jaxvllm.bench.requests import shared_prefix
from jaxvllm.bench.throughput import engine_options, start_figures
from jaxvllm.engine.llm_engine import LLMEngine


def measure(
    *,
    model: str | None,
    random: str | None,
    num_requests: int,
    shared: int,
    length: int,
    max_tokens: int,
    repeats: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Returns both throughputs, alternating runs, their median ratio, and what the cache saved."""
    if not 0 <= shared < length:
        raise ValueError(f"--shared={shared} is not below --length={length}: prompts need something of their own.")
    engine, _ = make_engine(model, random, options)
    requests = shared_prefix(engine.model_config.vocab_size, num_requests, shared, length, max_tokens)
    run_requests(engine, requests[:2])  # whatever is done once is done
    work = Work.of(engine)
    with_cache, without = [], []
    for _ in range(repeats):
        with_cache.append(run_requests(engine, requests, work))
        with _without_prefix_cache(engine):
            without.append(run_requests(engine, requests, work))
    ratios = [off.run_s / on.run_s for on, off in zip(with_cache, without, strict=True)]
    median = sorted(with_cache, key=lambda run: run.run_s)[len(with_cache) // 2]
    name = model.rsplit("/", 1)[-1] if model else random
    hit_rate = 1 - median.num_computed_tokens / median.num_prompt_tokens
    return {
        "benchmark": "prefix",
        "title": f"{num_requests} requests sharing {shared} of {length} tokens, {name}, {engine.model_config.dtype}",
        "summary": f"{statistics.median(ratios):.2f} times the throughput without the prefix cache",
        "machine": describe(),
        "configuration": engine_options(engine),
        "start": start_figures(engine),
        **median.report(),
        "hit_rate": round(hit_rate, 4),
        "saved_tokens": median.num_prompt_tokens - median.num_computed_tokens,
        "without_cache": without[0].report(),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
    }


@contextmanager
def _without_prefix_cache(engine: LLMEngine) -> Iterator[None]:
    """No block is entered into the cache, so that none is found."""
    manager = engine.scheduler.block_manager
    manager.hash_block = lambda seq, i: None
    try:
        yield
    finally:
        del manager.hash_block
