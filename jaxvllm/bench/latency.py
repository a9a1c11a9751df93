"""`jaxvllm bench latency`: requests that arrive over time; how long until the first token, and between tokens."""

from time import perf_counter, sleep
from typing import Any

import numpy as np

from jaxvllm.bench import requests as workloads
from jaxvllm.bench.machine import describe
from jaxvllm.bench.measure import make_engine, make_sequence, run_requests
from jaxvllm.bench.requests import Request
from jaxvllm.bench.throughput import engine_options, start_figures
from jaxvllm.engine.llm_engine import LLMEngine
from jaxvllm.engine.stats import compile_count

_PERCENTILES = (50, 90, 99)


def measure(
    *, model: str | None, random: str | None, workload: str, rate: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns percentiles in milliseconds, of requests that arrive at `rate` per second, at random, seed 0."""
    if not rate > 0:
        raise ValueError(f"--rate={rate} is not a positive number of requests per second.")
    engine, encode = make_engine(model, random, options)
    requests = workloads.load(workload, engine.model_config.vocab_size, encode)
    engine.model_runner.warm_up(show_progress=False)  # arrivals meet batches of every size
    run_requests(engine, requests[: engine.config.max_num_seqs])  # whatever is done once is done
    engine.scheduler.block_manager.forget_contents()
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(requests)))
    compiled = compile_count()
    first_s, token_s, run_s = _serve(engine, requests, arrivals.tolist())
    name = model.rsplit("/", 1)[-1] if model else random
    first_ms, token_ms = _percentiles(first_s), _percentiles(token_s)
    return {
        "benchmark": "latency",
        "title": f"latency, {name}, {workload}, {rate:g} requests/s, {engine.model_config.dtype}",
        "summary": f"first token {first_ms['p50']:.0f} ms, then {token_ms['p50']:.0f} ms a token (medians)",
        "machine": describe(),
        "configuration": engine_options(engine),
        "workload": {"name": workload.rsplit("/", 1)[-1], "num_requests": len(requests), "rate_per_s": rate},
        "start": start_figures(engine),
        "first_token_ms": first_ms,
        "per_token_ms": token_ms,
        "num_compiled_in_run": (compile_count() - compiled).num_requests,
        "run_s": round(run_s, 3),
        "tokens_per_s": round(sum(request.max_tokens for request in requests) / run_s, 2),
    }


def _serve(engine: LLMEngine, requests: list[Request], arrivals: list[float]) -> tuple[list[float], list[float], float]:
    """Returns seconds from each arrival to its first token, from each token to the next, and of the whole run."""
    waiting = [(at, make_sequence(engine, request)) for at, request in zip(arrivals, requests, strict=True)]
    last_at: dict[int, float] = {}  # by request: when it arrived, or its last token came
    has_first: set[int] = set()
    first_s, token_s = [], []
    start = perf_counter()
    while waiting or last_at:
        while waiting and waiting[0][0] <= perf_counter() - start:
            at, seq = waiting.pop(0)
            last_at[engine.add(seq)] = start + at
        if not last_at:
            sleep(max(0.0, waiting[0][0] - (perf_counter() - start)))
            continue
        events = engine.step()
        now = perf_counter()
        for event in events:
            seq_id = event.seq.seq_id
            if event.new_ids:
                (token_s if seq_id in has_first else first_s).append(now - last_at[seq_id])
                has_first.add(seq_id)
                last_at[seq_id] = now
            if event.finish_reason is not None:
                del last_at[seq_id]
    return first_s, token_s, perf_counter() - start


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {f"p{p}": 0.0 for p in _PERCENTILES}
    return {f"p{p}": round(1e3 * float(np.percentile(seconds, p)), 2) for p in _PERCENTILES}
