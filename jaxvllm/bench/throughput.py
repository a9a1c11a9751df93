"""`jaxvllm bench throughput`: all requests at once, and how fast they are done; beside a peer, if asked."""

import contextlib
import statistics
import sys
from typing import Any

import jax

from jaxvllm.bench import requests as workloads
from jaxvllm.bench.machine import describe
from jaxvllm.bench.measure import Work, make_engine, run_requests
from jaxvllm.bench.peers import Peer
from jaxvllm.bench.requests import Request
from jaxvllm.engine.llm_engine import LLMEngine

_SHOWN_OPTIONS = (
    "dtype", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "kvcache_block_size", "num_kvcache_blocks",
    "async_scheduling",
)  # fmt: skip


def measure(
    *,
    model: str | None,
    random: str | None,
    workload: str,
    repeats: int,
    options: dict[str, Any],
    against: str | None = None,
    peer_python: str | None = None,
    profile: str | None = None,
) -> dict[str, Any]:
    """Returns the figures of the median run, and the median ratio to the peer of alternating runs."""
    engine, encode = make_engine(model, random, options)
    requests = workloads.load(workload, engine.model_config.vocab_size, encode)
    with contextlib.ExitStack() as stack:
        peer = None
        if against == "turns":
            peer = StepsInTurn(engine, requests)
        elif against is not None:
            if model is None:
                raise ValueError("--against needs --model: a peer loads a checkpoint.")
            dtype = engine.model_config.dtype
            peer = stack.enter_context(Peer(against, model, dtype, requests, peer_python))
        run_requests(engine, requests)  # whatever is done once is done
        work = Work.of(engine)
        runs, peer_runs = [], []
        for _ in range(repeats):
            runs.append(run_requests(engine, requests, work))
            if peer is not None:
                peer_runs.append(peer.run())
                print(f"{runs[-1].run_s:.2f} s, {against} {peer_runs[-1][0]:.2f} s", file=sys.stderr, flush=True)
        if profile is not None:
            with jax.profiler.trace(profile):
                run_requests(engine, requests)
    median = sorted(runs, key=lambda run: run.run_s)[len(runs) // 2]
    name = model.rsplit("/", 1)[-1] if model else random
    result = {
        "benchmark": "throughput",
        "title": f"throughput, {name}, {workload.rsplit('/', 1)[-1]}, {engine.model_config.dtype}",
        "summary": f"{median.tokens_per_s:.1f} tokens/s",
        "machine": describe(),
        "configuration": engine_options(engine),
        "workload": {"name": workload.rsplit("/", 1)[-1], "num_requests": len(requests)},
        "start": start_figures(engine),
        **median.report(),
        "all_run_s": [round(run.run_s, 3) for run in runs],
        "all_cpu_s": [round(run.cpu_s, 3) for run in runs],
        "copy_gb_per_s": round(work.bytes_per_s / 1e9, 2),
        "product_gflop_per_s": round(work.flops_per_s / 1e9, 1),
    }
    if peer is not None:
        ratios = [theirs[0] / ours.run_s for theirs, ours in zip(peer_runs, runs, strict=True)]
        cpu_ratios = [theirs[1] / ours.cpu_s for theirs, ours in zip(peer_runs, runs, strict=True)]
        peer_s = statistics.median([run_s for run_s, _ in peer_runs])
        result["peer"] = {
            "name": against,
            "versions": peer.versions,
            "all_run_s": [round(run_s, 3) for run_s, _ in peer_runs],
            "all_cpu_s": [round(cpu_s, 3) for _, cpu_s in peer_runs],
            "tokens_per_s": round(median.num_generated_tokens / peer_s, 2),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "median_ratio": round(statistics.median(ratios), 3),
            "median_cpu_ratio": round(statistics.median(cpu_ratios), 3),
        }
        result["summary"] += f", {statistics.median(ratios):.2f} times {peer.label}"
    return result


class StepsInTurn:
    """The same engine without `async_scheduling`, as a peer."""

    label, versions = "with steps in turn", {}

    def __init__(self, engine: LLMEngine, requests: list[Request]):
        self._engine, self._requests = engine, requests

    def run(self) -> tuple[float, float]:
        engine = self._engine
        engine.loop.is_ahead = False
        try:
            run = run_requests(engine, self._requests)
        finally:
            engine.loop.is_ahead = engine.config.async_scheduling
        return run.run_s, run.cpu_s


def engine_options(engine: Any) -> dict[str, Any]:
    """The options that decide a measurement."""
    options = {name: getattr(engine.config, name) for name in _SHOWN_OPTIONS}
    return options | {"dtype": engine.model_config.dtype, "attention_backend": engine.model_runner.backend}


def start_figures(engine: Any) -> dict[str, Any]:
    compiled = engine.stats.compiled
    return {
        "start_s": round(engine.stats.start_s, 2),
        "num_programs": engine.model_runner.num_programs,
        "num_buckets": engine.model_runner.num_buckets,
        "num_compiled": compiled.num_compiled,
        "num_from_cache": compiled.num_cache_hits,
        "compile_s": round(compiled.compile_s, 2),  # summed over threads
    }
