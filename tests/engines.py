"""Small engines for tests, and the solo run that every other run is compared with."""

import numpy as np

from jaxvllm import LLM, SamplingParams
from jaxvllm.engine.scheduler import Scheduler

GREEDY = {"temperature": 0.0, "ignore_eos": True}

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 128,
    "seq_buckets": (2, 8),
    "token_buckets": (16, 128),
}


def make_llm(path, **options) -> LLM:
    """A small float32 engine that compiles only what it needs; `options` override."""
    for limit, buckets in (("max_num_seqs", "seq_buckets"), ("max_num_batched_tokens", "token_buckets")):
        if limit in options:
            options.setdefault(buckets, ())
    return LLM(str(path), use_tqdm=False, **SMALL | options)


def forget(llm: LLM):
    """Makes the engine's metadata as new: no request, no cached prefix."""
    llm.engine.loop.scheduler = Scheduler(llm.config)


def solo(llm: LLM, prompt, params: SamplingParams) -> list[int]:
    """The tokens of a request that runs alone in a fresh engine."""
    forget(llm)
    return llm.generate([prompt], params, use_tqdm=False)[0].token_ids


def random_prompts(lengths, *, vocab_size, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def assert_all_blocks_free(llm: LLM):
    """Every block is back, and every block is accounted for."""
    manager = llm.engine.scheduler.block_manager
    manager.check_integrity([])
    assert len(manager.free_block_ids) == llm.config.num_kvcache_blocks
