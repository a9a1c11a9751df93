"""Runs requests through an engine and accounts for the time: where it went, and what it could have been."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.bench.machine import copy_bandwidth, product_rate
from jaxvllm.bench.random_model import RandomCheckpoint, num_parameters
from jaxvllm.bench.requests import Request
from jaxvllm.config import EngineConfig
from jaxvllm.engine.build import build_engine
from jaxvllm.engine.llm_engine import LLMEngine
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.stats import HOST_WORK, PHASES, TRANSFERS, compile_count
from jaxvllm.engine.step import ScheduledStep
from jaxvllm.models.checkpoint.loader import open_checkpoint, resolve_path
from jaxvllm.sampling_params import SamplingParams
from jaxvllm.tokenizer import load_tokenizer


def make_engine(
    model: str | None, random: str | None, options: dict[str, Any]
) -> tuple[LLMEngine, Callable[[str], list[int]] | None]:
    """Returns an engine for a checkpoint, or for a config with random weights, and how to make ids of text."""
    if (model is None) == (random is None):
        raise ValueError("give either --model, a checkpoint, or --random, a config without weights.")
    config = EngineConfig(model=model or f"random {random}", **options)
    if random is not None:
        return build_engine(config, RandomCheckpoint(random), frozenset(), use_tqdm=False), None  # pyright: ignore[reportArgumentType]
    assert model is not None
    checkpoint = open_checkpoint(resolve_path(model))
    tokenizer = load_tokenizer(checkpoint)
    return build_engine(config, checkpoint, tokenizer.eos_token_ids, use_tqdm=False), tokenizer.encode


@dataclass(slots=True)
class Work:
    """What a run's steps had to move and compute at least; see `Work.add`."""

    weight_bytes: float  # of the model, once
    cache_bytes_per_token: float  # all layers
    num_weights: float  # that every token meets, without the embedding's table and the head
    head_weights: float  # that every sampled token meets
    attention_flops_per_key: float  # all layers, one query token
    bytes_per_s: float
    flops_per_s: float
    floor_s: float = 0.0
    num_bytes: float = 0.0
    num_flops: float = 0.0

    @classmethod
    def of(cls, engine: LLMEngine) -> "Work":
        """The model's figures, and the machine's, measured now."""
        model = engine.model_config
        params = engine.model_runner.params
        itemsize = jnp.dtype(model.dtype).itemsize
        head = model.vocab_size * model.hidden_size
        tables = head * (1 if model.tie_word_embeddings else 2)
        return cls(
            weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - (tables - head) * itemsize,
            cache_bytes_per_token=2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize,
            num_weights=num_parameters(params) - tables,
            head_weights=head,
            attention_flops_per_key=4 * model.num_layers * model.num_heads * model.head_dim,
            bytes_per_s=copy_bandwidth(),
            flops_per_s=max(map(product_rate, {model.dtype, "float32"})),  # some CPUs are slower in bfloat16
        )

    def add(self, step: ScheduledStep):
        """Counts a scheduled step: every weight once, every cached token that is seen once, all products.

        The step's floor is the longer of bytes over the copy bandwidth and operations over the product rate.
        """
        num_bytes, flops = self.weight_bytes, 0.0
        for start, num_new in zip(step.starts, step.num_new, strict=True):
            num_bytes += (start + 2 * num_new) * self.cache_bytes_per_token  # the new ones are written and read
            flops += num_new * (2 * self.num_weights + (start + num_new / 2) * self.attention_flops_per_key)
            flops += 2 * self.head_weights
        self.num_bytes += num_bytes
        self.num_flops += flops
        self.floor_s += max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One timed run; the shares are of `run_s`."""

    run_s: float
    cpu_s: float  # of all threads: other work on the machine lengthens run_s far more than this
    num_generated_tokens: int
    num_prompt_tokens: int  # of the requests, cached ones included
    num_computed_tokens: int  # of prompts, run through the model
    num_steps: int
    phase_s: dict[str, float]
    hidden_host_s: float
    floor_s: float
    num_compiled: int  # during the run: 0 unless something was not warm

    @property
    def tokens_per_s(self) -> float:
        return self.num_generated_tokens / self.run_s

    def report(self) -> dict[str, Any]:
        """The figures of a JSON line."""
        phases = self.phase_s
        host, transfer = (sum(phases[name] for name in names) for names in (HOST_WORK, TRANSFERS))
        return {
            "run_s": round(self.run_s, 4),
            "cpu_s": round(self.cpu_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "total_tokens_per_s": round((self.num_generated_tokens + self.num_prompt_tokens) / self.run_s, 2),
            "num_generated_tokens": self.num_generated_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "num_steps": self.num_steps,
            "host_share": round(host / self.run_s, 4),
            "wait_share": round(phases["wait"] / self.run_s, 4),
            "transfer_share": round(transfer / self.run_s, 4),
            "hidden_host_share": round(self.hidden_host_s / max(host + transfer, 1e-9), 4),
            "ms_per_step": {name: round(1e3 * s / self.num_steps, 4) for name, s in phases.items()},
            "floor_s": round(self.floor_s, 4),
            "floor_share": round(self.floor_s / self.run_s, 4),
            "num_compiled_in_run": self.num_compiled,
        }


def run_requests(engine: LLMEngine, requests: list[Request], work: Work | None = None) -> Run:
    """Runs requests that all arrive at once, to their end, and times it. Prefixes cached before are forgotten."""
    assert engine.is_finished()
    engine.scheduler.block_manager.forget_contents()
    seqs = [make_sequence(engine, request) for request in requests]
    before, compiled = dataclasses.replace(engine.stats), compile_count()
    phases, hidden = dict(engine.stats.times.seconds), engine.stats.times.hidden_host_s
    floor_before = work.floor_s if work else 0.0
    engine.loop.on_dispatch = work.add if work else None
    try:
        start, cpu_start = perf_counter(), process_time()
        for seq in seqs:
            engine.add(seq)
        while not engine.is_finished():
            engine.step()
        run_s, cpu_s = perf_counter() - start, process_time() - cpu_start
    finally:
        engine.loop.on_dispatch = None
    times = engine.stats.times
    return Run(
        run_s=run_s,
        cpu_s=cpu_s,
        num_generated_tokens=sum(seq.num_completion_tokens for seq in seqs),
        num_prompt_tokens=sum(seq.num_prompt_tokens for seq in seqs),
        num_computed_tokens=engine.stats.num_prompt_tokens - before.num_prompt_tokens,
        num_steps=engine.stats.num_steps - before.num_steps,
        phase_s={name: times.seconds[name] - phases[name] for name in PHASES},
        hidden_host_s=times.hidden_host_s - hidden,
        floor_s=(work.floor_s if work else 0.0) - floor_before,
        num_compiled=(compile_count() - compiled).num_requests,
    )


def make_sequence(engine: LLMEngine, request: Request) -> Sequence:
    params = SamplingParams(request.temperature, request.max_tokens, ignore_eos=True)
    seq = engine.make_sequence(request.token_ids, params)
    if seq.max_tokens < request.max_tokens:
        raise ValueError(
            f"a request of {len(request.token_ids)} tokens in and {request.max_tokens} out does not fit: "
            f"max_model_len={engine.config.max_model_len}, num_kvcache_blocks={engine.config.num_kvcache_blocks}."
        )
    return seq
