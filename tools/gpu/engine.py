"""The whole engine on a GPU, with random weights made there: NanoVLLM's workload, tokens per second and the floor.

The engine's own loop drives the scheduler and the model runner, one step ahead, token ids in and out: neither a
checkpoint nor a tokenizer is needed.
"""

import dataclasses
from random import Random
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvllm.config import EngineConfig
from jaxvllm.engine.model_runner import ModelRunner, choose_backend
from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.step_loop import StepLoop
from jaxvllm.models import registry
from jaxvllm.models.config import ModelConfig
from jaxvllm.sampling_params import SamplingParams
from tools.gpu.record import Record

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
TINY: dict[str, Any] = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
NANO = {"num_requests": 256, "lengths": (100, 1024)}  # tokens in, and tokens out
TINY_NANO = {"num_requests": 6, "lengths": (3, 12)}
_OPTIONS: dict[str, Any] = {
    "max_model_len": 4096,
    "token_buckets": (8192,),  # few programs: compiling them takes longer than the run
    "seq_buckets": (64, 128, 256),
}
_TINY_OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "token_buckets": (64,),
    "seq_buckets": (4,),
}
_TIME_LIMIT_S = 60  # of the run after the warm-up: what is slower is cut short, and says so


def make_model(values: dict[str, Any], dtype: str) -> tuple[ModelConfig, nnx.Module]:
    """Returns a model with random weights, made on the device, of a Hugging Face config's values."""
    config = ModelConfig.from_hf(SimpleNamespace(**values), dtype=dtype, eos_token_ids=frozenset())
    graphdef, state = nnx.split(nnx.eval_shape(lambda: registry.resolve(config.model_type).make(config)))
    leaves, tree = jax.tree.flatten(state)

    @jax.jit
    def make(key):
        keys = jax.random.split(key, len(leaves))
        return [_weight(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]

    return config, nnx.merge(graphdef, jax.tree.unflatten(tree, make(jax.random.key(0))))


def _weight(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A norm's weights are 1; a matrix keeps the size of what it multiplies."""
    if len(leaf.shape) < 2:
        return jnp.ones(leaf.shape, leaf.dtype)
    return jax.random.normal(key, leaf.shape, leaf.dtype) * leaf.shape[-1] ** -0.5


@dataclasses.dataclass
class _Totals:
    """What a run adds up, in seconds and counts. A step's time is from ids to ids."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    gap_s: float = 0.0  # host work that the device may have waited for
    num_decodes: int = 0
    num_prefills: int = 0
    num_waited: int = 0  # steps whose ids the host had to wait for: the device was never idle before them
    num_tokens: int = 0  # generated
    decode_bytes: int = 0  # the least that the decode steps can read: weights, and live keys and values


def run_workload(card: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Runs NanoVLLM's benchmark workload; returns rates, times and the decode steps' floor from bytes."""
    workload = TINY_NANO if tiny else NANO
    model_config, model = make_model(TINY if tiny else QWEN3_0_6B, "float32" if tiny else "bfloat16")
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model)))
    config = EngineConfig(model="random weights", eos=frozenset(), **(_TINY_OPTIONS if tiny else _OPTIONS))
    begin = perf_counter()
    backend = choose_backend(config, model_config, jax.devices()[0])
    runner = ModelRunner(config, model_config, model, backend)
    runner.warm_up(show_progress=False)
    warm_up_s = perf_counter() - begin
    config = dataclasses.replace(config, num_kvcache_blocks=runner.num_blocks)

    seqs = _make_sequences(config, model_config.vocab_size, **workload)
    _run_all(runner, Scheduler(config), seqs[:2], model_config, weight_bytes)  # whatever is done once is done
    scheduler, seqs = Scheduler(config), _make_sequences(config, model_config.vocab_size, **workload)
    busy_s_before = runner.times.busy_s
    begin = perf_counter()
    totals = _run_all(runner, scheduler, seqs, model_config, weight_bytes)
    seconds = perf_counter() - begin

    num_steps = totals.num_decodes + totals.num_prefills
    result = {
        "backend": runner.backend,
        "num_kvcache_blocks": runner.num_blocks,
        "programs": runner.num_programs,
        "warm_up_s": warm_up_s,
        "complete": scheduler.is_finished(),
        "run_s": seconds,
        "output_tokens_per_s": totals.num_tokens / seconds,
        "host_s_per_step": (runner.times.busy_s - busy_s_before) / num_steps,
        # what of the run was neither the device at work nor hidden behind it, at most: the host's work in the steps
        # that it did not have to wait for
        "host_gap_s_per_step": totals.gap_s / num_steps,
        "decode_s_per_step": totals.decode_s / max(1, totals.num_decodes),
        "weight_bytes": weight_bytes,
        **dataclasses.asdict(totals),
    }
    bandwidth = card.get("copy_bandwidth", {}).get("bytes_per_s")
    if bandwidth:
        floor_s = totals.decode_bytes / bandwidth
        result |= {"decode_floor_s": floor_s, "decode_over_floor": totals.decode_s / floor_s}
    return result


def _make_sequences(config: EngineConfig, vocab_size: int, num_requests: int, lengths: tuple[int, int]):
    rng = Random(0)
    num_ids = min(10_000, vocab_size)  # prompts are made of the vocabulary's first ids
    prompts = [[rng.randrange(num_ids) for _ in range(rng.randint(*lengths))] for _ in range(num_requests)]
    params = [SamplingParams(0.6, rng.randint(*lengths), ignore_eos=True, seed=i) for i in range(num_requests)]
    return [
        Sequence(prompt, p, block_size=config.kvcache_block_size, seq_id=i)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]


def _run_all(
    runner: ModelRunner, scheduler: Scheduler, seqs: list[Sequence], model: ModelConfig, weight_bytes: int
) -> _Totals:
    """Runs the sequences to their ends, or to the time limit, a step dispatched while the one before runs."""
    totals = _Totals()
    for seq in seqs:
        scheduler.add(seq)
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize

    clock = runner.times
    loop = StepLoop(scheduler, runner, clock, is_ahead=True)
    begin = came_s = perf_counter()
    while not scheduler.is_finished() and came_s - begin < _TIME_LIMIT_S:
        busy_s, hidden_s = clock.busy_s, clock.hidden_host_s
        step = loop.run_step()
        step_s, came_s = perf_counter() - came_s, perf_counter()
        if clock.hidden_host_s > hidden_s:
            totals.num_waited += 1
        else:  # the device may have been idle while the host worked
            totals.gap_s += clock.busy_s - busy_s
        totals.num_tokens += sum(step.is_sampled)
        if step.is_prefill:
            totals.num_prefills += 1
            totals.prefill_s += step_s
        else:
            totals.num_decodes += 1
            totals.decode_s += step_s
            totals.decode_bytes += weight_bytes + kv_bytes * (sum(step.starts) + len(step.seqs))
    return totals


def run(record: Record, *, card: dict[str, Any], tiny: bool):
    """Runs the workload once and records it."""
    record.run("NanoVLLM's workload, Qwen3-0.6B" if not tiny else "tiny", run_workload, card, tiny=tiny)
