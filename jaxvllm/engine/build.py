"""Assembles an engine from options, a checkpoint and a device. What can be refused early is refused early."""

import dataclasses
import logging
from time import perf_counter

import jax

from jaxvllm.config import DEFAULTS, EngineConfig
from jaxvllm.engine.llm_engine import LLMEngine
from jaxvllm.engine.model_runner import ModelRunner, choose_backend
from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.stats import EngineStats, compile_count, enable_compilation_cache
from jaxvllm.models.checkpoint.loader import Checkpoint, load_model, loaded_config
from jaxvllm.models.config import ModelConfig

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer_eos: frozenset[int], *, use_tqdm: bool = True
) -> LLMEngine:
    """Loads the model, sizes and allocates the cache and, unless `enforce_eager`, compiles every bucket.

    `tokenizer_eos` are the end ids that the tokenizer names. Raises `ValueError` on options that the model or the
    device cannot serve, before any weight is read where that can be known.
    """
    start = perf_counter()
    compiled_before = compile_count()
    enable_compilation_cache()
    model_config = loaded_config(checkpoint, config.dtype)
    config = _settled(config, model_config, tokenizer_eos)
    backend = choose_backend(config, model_config, jax.devices()[0])
    model_config, model = load_model(checkpoint, config.dtype, quantization=config.quantization)
    model.max_len = config.max_model_len
    runner = ModelRunner(config, model_config, model, backend)
    config = dataclasses.replace(config, num_kvcache_blocks=runner.num_blocks)
    if not config.enforce_eager:
        runner.warm_up(show_progress=use_tqdm)
    stats = EngineStats(times=runner.times, compiled_before=compiled_before)
    stats.count_compiled()
    stats.start_s = perf_counter() - start
    return LLMEngine(config, Scheduler(config), runner, stats)


def _settled(config: EngineConfig, model_config: ModelConfig, tokenizer_eos: frozenset[int]) -> EngineConfig:
    """Fills in what depends on the model: its length and its end ids."""
    longest = model_config.max_position_embeddings
    if config.max_model_len > longest and config.max_model_len != DEFAULTS["max_model_len"]:
        logger.warning("max_model_len=%d is cut to the model's %d.", config.max_model_len, longest)
    return dataclasses.replace(
        config,
        max_model_len=min(config.max_model_len, longest),
        eos=config.eos_ids | model_config.eos_token_ids | tokenizer_eos,
    )
