"""`jaxvllm bench metadata`: what scheduling costs on the host, without a model and without a device."""

import gc
import statistics
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from jaxvllm.bench.plain_block_manager import PlainBlockManager
from jaxvllm.engine.batch import Bucket, pack_step, whole_piece
from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.sequence import Sequence
from jaxvllm.sampling_params import SamplingParams

_BLOCK_SIZE = 16
_PROMPT_BLOCKS = 32  # full blocks of a cached prompt
_SMALL_POOL = 1_000
_TOKENS = list(range(300, 30_300))  # ids that exist once, so that a million blocks of them fit in memory
_VOCAB_SIZE = 32_000


class _Limits(NamedTuple):
    """What a scheduler reads of an engine's configuration."""

    num_kvcache_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int = 1 << 20
    kvcache_block_size: int = _BLOCK_SIZE
    eos: int = -1


def measure(num_blocks: int = 1_000_000, num_seqs: int = 4096, repeats: int = 200) -> dict[str, Any]:
    """Returns microseconds per operation; medians of `repeats`."""
    if num_blocks < _SMALL_POOL or num_seqs < 1 or repeats < 1:
        raise ValueError(f"blocks={num_blocks}, seqs={num_seqs}, repeats={repeats}: at least {_SMALL_POOL}, 1, 1.")
    small = _allocation_us(BlockManager, _SMALL_POOL, repeats)
    large = _allocation_us(BlockManager, num_blocks, repeats)
    plain = _allocation_us(PlainBlockManager, num_blocks, max(3, repeats // 40))
    hits = _PROMPT_BLOCKS
    return {
        "title": f"metadata, {num_blocks:,} blocks, half of them cached and free, {hits} blocks found per allocation",
        "summary": f"{large:.0f} us an allocation, {plain / large:,.0f} times faster than the plain block manager",
        "allocation_us": {
            f"{_SMALL_POOL} blocks": round(small, 1),
            f"{num_blocks} blocks": round(large, 1),
            f"plain, {num_blocks} blocks": round(plain, 1),
        },
        "times_faster_than_plain": round(plain / large, 1),
        "times_cost_at_1000_blocks": round(large / small, 3),
        "decode_step_of_256_ms": decode_step_ms(256, 100),
        f"decode_step_of_{num_seqs}_ms": decode_step_ms(num_seqs, 20),
        "prompt_of_32768_tokens_ms": _long_prompt_ms(num_blocks),
    }


def _allocation_us(kind: type[BlockManager] | type[PlainBlockManager], num_blocks: int, repeats: int) -> float:
    """A new request's `can_allocate` and `allocate`, all its full blocks in the cache and free."""
    manager, rng = kind(num_blocks, _BLOCK_SIZE), Random(0)
    prompts = []
    for _ in range(num_blocks // 2 // (_PROMPT_BLOCKS + 1)):
        seq = Sequence(rng.choices(_TOKENS, k=_PROMPT_BLOCKS * _BLOCK_SIZE + 1), block_size=_BLOCK_SIZE)
        _admit(manager, seq)
        seq.num_scheduled_tokens = seq.num_tokens
        manager.hash_blocks(seq)
        manager.deallocate(seq)
        prompts.append(seq.token_ids)
    times = []
    gc.collect()
    gc.freeze()  # a collection would walk over a million blocks, in whatever operation it hits
    try:
        for _ in range(repeats):
            seq = Sequence(rng.choice(prompts), block_size=_BLOCK_SIZE)
            start = perf_counter()
            num_cached = _admit(manager, seq)
            times.append(perf_counter() - start)
            assert num_cached == _PROMPT_BLOCKS
            manager.deallocate(seq)
    finally:
        gc.unfreeze()
    return 1e6 * statistics.median(times)


def _admit(manager: BlockManager | PlainBlockManager, seq: Sequence) -> int:
    num_cached = manager.can_allocate(seq)
    manager.allocate(seq, num_cached)
    return num_cached


def decode_step_ms(num_seqs: int, num_steps: int, context: int = 512) -> dict[str, float]:
    """Milliseconds of a decode step of that many sequences, by phase; medians over the steps.

    Steps in turn, as without `async_scheduling`; contexts from 1 to twice `context`, so that each step begins blocks.
    """
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 2 * context, num_seqs).tolist()
    num_blocks = sum(-(-n // _BLOCK_SIZE) for n in lens) + num_seqs * (num_steps // _BLOCK_SIZE + 2)
    scheduler = Scheduler(_Limits(num_blocks, num_seqs))
    params = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    for n in lens:
        scheduler.add(Sequence(rng.integers(0, _VOCAB_SIZE, n).tolist(), params, block_size=_BLOCK_SIZE))
    while scheduler.waiting:
        step = scheduler.schedule()
        scheduler.postprocess(step.seqs, [5] * len(step.seqs), step.is_prefill)
    widest = 2 * context // _BLOCK_SIZE + num_steps
    bucket = Bucket(num_seqs, num_seqs, widest, True)
    options = {"num_slots": num_blocks * _BLOCK_SIZE, "num_ids": num_seqs, "vocab_size": _VOCAB_SIZE, "eos": ()}
    rows = []
    for _ in range(num_steps):
        times = [perf_counter()]
        step = scheduler.schedule()
        times.append(perf_counter())
        assert not step.is_prefill
        assert len(step.seqs) == num_seqs
        pack_step(whole_piece(step), bucket, **options)
        times.append(perf_counter())
        scheduler.postprocess(step.seqs, [5] * num_seqs, False)
        times.append(perf_counter())
        rows.append(np.diff(times))
    schedule, batch, postprocess = (1e3 * np.median(rows, axis=0)).round(4).tolist()
    total = round(1e3 * float(np.median(np.sum(rows, axis=1))), 4)
    return {"schedule": schedule, "batch": batch, "postprocess": postprocess, "all": total}


def _long_prompt_ms(num_blocks: int) -> dict[str, float]:
    """A prompt of 32,768 tokens: the first, and one that shares all but its last 1,024 of them."""
    manager = BlockManager(max(num_blocks, 4096), _BLOCK_SIZE)
    tokens = Random(1).choices(_TOKENS, k=32_768)
    times = {}
    for name, ids in (("new", tokens), ("shared", tokens[:-1024] + tokens[:1024])):
        seq = Sequence(ids, block_size=_BLOCK_SIZE)
        start = perf_counter()
        _admit(manager, seq)
        seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
        manager.hash_blocks(seq)
        times[name] = round(1e3 * (perf_counter() - start), 3)
    return times
