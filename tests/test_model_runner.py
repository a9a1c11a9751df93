import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, make_llm, random_prompts

from jaxvllm import SamplingParams
from jaxvllm.engine import model_runner
from jaxvllm.engine.batch import Bucket, pack_step, packed_fields, whole_piece
from jaxvllm.engine.model_runner import unpack
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.step import ScheduledStep


def test_device_unpacks_what_the_host_packed():
    bucket = Bucket(16, 2, 3, False)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 5)
    seq = Sequence([9, 8, 7], params, block_size=4)
    seq.block_table, seq.num_scheduled_tokens = [5], 3
    piece = whole_piece(ScheduledStep.of([seq], "prefill"))
    buffer = pack_step(piece, bucket, num_slots=40, num_ids=2, vocab_size=99, eos=())
    arrays = unpack(jnp.asarray(buffer), bucket)
    fields, _ = packed_fields(bucket)
    assert set(arrays) == set(fields)
    for name, field in fields.items():
        size = int(np.prod(field.shape))
        host = buffer[field.offset : field.offset + size].view(field.dtype).reshape(field.shape)
        assert arrays[name].dtype == field.dtype
        np.testing.assert_array_equal(np.asarray(arrays[name]), host)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_updates_the_cache_in_place(tiny_llama_path, dtype):
    llm = make_llm(tiny_llama_path, dtype=dtype, num_kvcache_blocks=4096)
    runner = llm.engine.model_runner
    runner.warm_up(show_progress=False)
    pool_bytes = runner._kv_cache[0].nbytes
    cache_bytes = sum(pool.nbytes for pool in runner._kv_cache)
    for bucket, program in runner._programs.items():
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == cache_bytes, bucket
        assert memory.temp_size_in_bytes < pool_bytes / 2, bucket


_RESULT = re.compile(r"\s*(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(")  # an instruction's shape and name, in HLO


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_step_transposes_converts_or_copies_a_weight(tiny_llama_path, dtype):
    """In the compiled programs nothing has the shape of a weight, either way round, but the weights themselves."""
    llm = make_llm(tiny_llama_path, dtype=dtype, seq_buckets=(1, 8))
    runner = llm.engine.model_runner
    runner.warm_up(show_progress=False)
    weights = [leaf.shape for leaf in jax.tree.leaves(runner.params) if leaf.ndim == 2]
    shapes = {shape[::order] for shape in weights for order in (1, -1)}
    for bucket, program in runner._programs.items():
        found = Counter()
        for line in (program.as_text() or "").splitlines():
            if (match := _RESULT.match(line)) and tuple(map(int, match[1].split(","))) in shapes:
                found[match[2]] += 1
        assert set(found) == {"parameter"}, bucket
        assert found["parameter"] >= len(weights), "the pattern has to meet the weights"


def test_pool_buffers_stay_where_they_are(tiny_llama_path):
    llm = make_llm(tiny_llama_path)
    llm.generate([[1, 2, 3]], SamplingParams(**GREEDY, max_tokens=2), use_tqdm=False)
    before = [pool.unsafe_buffer_pointer() for pool in llm.engine.model_runner._kv_cache]
    llm.generate([[1, 2, 3]], SamplingParams(**GREEDY, max_tokens=9), use_tqdm=False)
    assert [pool.unsafe_buffer_pointer() for pool in llm.engine.model_runner._kv_cache] == before


def test_warm_up_compiles_one_program_per_bucket(tiny_llama_path):
    llm = make_llm(tiny_llama_path, enforce_eager=False, block_buckets=(8, 32))
    runner = llm.engine.model_runner
    assert runner.num_programs == runner.num_buckets == 2 * (2 + 2)


def test_eager_engine_compiles_only_what_it_meets(tiny_llama_path):
    llm = make_llm(tiny_llama_path)
    assert llm.engine.model_runner.num_programs == 0
    llm.generate([[1, 2, 3]], SamplingParams(**GREEDY, max_tokens=3), use_tqdm=False)
    assert llm.engine.model_runner.num_programs == 2  # one prefill, one decode


def test_guard_raises_when_a_step_would_compile_after_the_warm_up(tiny_llama_path):
    llm = make_llm(tiny_llama_path, enforce_eager=False, forbid_recompile=True)
    del llm.engine.model_runner._programs[Bucket(2, 2, 32, True)]
    with pytest.raises(RuntimeError, match="forbid_recompile"):
        llm.generate([[1, 2, 3]], SamplingParams(**GREEDY), use_tqdm=False)


def test_a_prefill_in_pieces_gives_the_tokens_of_a_whole_one(tiny_llama_path, monkeypatch):
    """On the CPU: prompts cut within, prompts side by side, and single new tokens that run as a decode."""
    whole = make_llm(tiny_llama_path, max_num_seqs=16, token_buckets=(128,), num_kvcache_blocks=512)
    monkeypatch.setattr(model_runner, "_CPU_PREFILL_TOKENS", 32)
    pieces = make_llm(tiny_llama_path, max_num_seqs=16, token_buckets=(), num_kvcache_blocks=512)
    assert max(pieces.engine.model_runner._buckets).num_tokens == 32
    prompts = random_prompts([70, 3, 41, 9, 1, 1], vocab_size=200)
    prompts += [[*prompts[0][:64], 5], [*prompts[0][:64], 6]]  # one new token each, once the first prompt is cached
    params = [SamplingParams(0.8 * (i % 2), max_tokens=5, ignore_eos=True, seed=i) for i in range(len(prompts))]
    for some in (slice(6), slice(6, 8)):
        tokens = [[o.token_ids for o in llm.generate(prompts[some], params[some], False)] for llm in (whole, pieces)]
        assert tokens[0] == tokens[1]


def test_more_than_one_chip_is_refused_for_now(tiny_llama_path):
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        make_llm(tiny_llama_path, tensor_parallel_size=2)


def test_padding_leaves_other_blocks_alone_to_the_bit(tiny_llama_path):
    """Fault case 13: a live sequence in the last block of the pool, a batch of one padded to eight."""
    llm = make_llm(tiny_llama_path, num_kvcache_blocks=6, seq_buckets=(8,))
    runner = llm.engine.model_runner
    noise = np.random.default_rng(0).standard_normal(runner._kv_cache[0].shape).astype(np.float32)
    runner._kv_cache = [jnp.asarray(noise) for _ in runner._kv_cache]
    for block_id in range(5):  # only the last block is left, and blocks 0 to 4 come after it
        llm.engine.scheduler.block_manager.free_block_ids.move_to_end(block_id)
    llm.generate([[1, 2]], SamplingParams(**GREEDY, max_tokens=2), use_tqdm=False)
    for pool in runner._kv_cache:
        np.testing.assert_array_equal(np.asarray(pool)[:5], noise[:5])
        assert not np.array_equal(np.asarray(pool)[5], noise[5])


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9])
def test_tokens_do_not_depend_on_what_the_cache_held_before(tiny_llama_path, prompt_len):
    """Fault cases 4 and 10: the whole cache filled with NaN; lengths around the ends of blocks, chunked and not."""
    [prompt] = random_prompts([prompt_len], vocab_size=200, seed=prompt_len)
    tokens = []
    for fill in (0, jnp.nan):
        for batched in (128, 3):
            llm = make_llm(
                tiny_llama_path,
                max_num_batched_tokens=batched,
                max_num_seqs=2,
                num_kvcache_blocks=32,
            )
            runner = llm.engine.model_runner
            runner._kv_cache = jax.tree.map(lambda pool, fill=fill: jnp.full_like(pool, fill), runner._kv_cache)
            [output] = llm.generate([prompt], SamplingParams(**GREEDY, max_tokens=6), use_tqdm=False)
            tokens.append(output.token_ids)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert len(tokens[0]) == 6
