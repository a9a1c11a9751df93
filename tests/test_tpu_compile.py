"""The TPU's programs through the real compiler, for chips that are not here."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxvllm import chips
from jaxvllm.bench import compile_matrix
from jaxvllm.bench.kernel import lower_attend
from jaxvllm.bench.schedule import Case
from jaxvllm.compile import compile_steps, parse_chip
from jaxvllm.config import EngineConfig
from jaxvllm.kernels import kv_cache, paged_attention

needs_libtpu = pytest.mark.skipif(chips.why_no_compiler() is not None, reason=str(chips.why_no_compiler()))
DECODE = Case(
    chip="v6e", kernel="decode", num_heads=8, num_kv_heads=2, head_dim=128, block_size=64, max_context=1024,
    num_seqs=16, num_tokens=16,
)  # fmt: skip


@needs_libtpu
@pytest.mark.parametrize("kernel", ["decode", "ragged"])
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_the_kernels_compile(chip, kernel):
    lower_attend(replace(DECODE, chip=chip, kernel=kernel, num_tokens=16 if kernel == "decode" else 256)).compile()


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("chip", chips.CHIPS)
def test_a_third_of_the_forms_compile(chip):
    """`python -m jaxvllm.bench.compile_matrix` takes them all."""
    for _, case in list(compile_matrix.cases(chip))[list(chips.CHIPS).index(chip) % 3 :: 3]:
        compile_matrix.compile_seconds(case)


@needs_libtpu
@pytest.mark.parametrize("num_tokens", [16, 2048])
def test_the_write_is_in_place_whatever_the_number_of_tokens(num_tokens):
    pool = jax.ShapeDtypeStruct(kv_cache.pool_shape(4096, 8, 64, 128, "tpu"), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

    def write(*arguments):
        return paged_attention.write(*arguments, backend="tpu")

    memory = chips.lower_for("v5e", write, pool, new, new, slots, donate=(0,)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.size * 2
    assert memory.temp_size_in_bytes < pool.size * 2 // 50


@pytest.fixture
def tiny_config(tmp_path):
    config = {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "attention_bias": False, "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e-1", "v6e-1", "v5p-1", "tpu7x-1"])
def test_whole_steps_compile_and_update_their_cache_in_place(tiny_config, chip):
    config = EngineConfig(
        model=str(tiny_config), kvcache_block_size=64, max_num_batched_tokens=256, max_num_seqs=16, max_model_len=1024
    )
    for step in compile_steps(chip, tiny_config, config):
        assert step.alias_bytes == step.pool_bytes
        assert step.fits
        assert step.temp_bytes < step.pool_bytes // 10


def test_chips_that_cannot_be_compiled_for_are_refused():
    assert parse_chip("tpu7x-1") == "tpu7x"
    with pytest.raises(ValueError, match="chip 'v4' is none of v5e, v5p, v6e, tpu7x"):
        parse_chip("v4-1")
    with pytest.raises(ValueError, match="compiles for one chip, use v6e-1"):
        parse_chip("v6e-4")


def test_the_clock_follows_from_the_published_peak():
    ghz = {name: round(chip.clock_hz / 1e9, 2) for name, chip in chips.CHIPS.items()}
    assert ghz == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
