"""The TPU's programs through the real compiler, for chips that are not here."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.aot import chips
from jaxvllm.kernels import kv_cache, paged_attention
from tools.tpu import compile_matrix
from tools.tpu.kernel import lower_attend
from tools.tpu.schedule import Case

needs_libtpu = pytest.mark.skipif(chips.why_no_compiler() is not None, reason=str(chips.why_no_compiler()))
# a program for a chip that is not here goes into the compilation cache and cannot be read back: it is compiled again
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
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
    """`python -m tools.tpu.compile_matrix` takes them all."""
    for _, case in list(compile_matrix.cases(chip))[list(chips.CHIPS).index(chip) % 3 :: 3]:
        compile_matrix.compile_seconds(case)


@needs_libtpu
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
def test_any_number_of_kv_heads_compiles_where_several_are_taken_at_once(num_kv_heads):
    case = replace(DECODE, kernel="ragged", num_tokens=256, num_kv_heads=num_kv_heads, num_heads=2 * num_kv_heads)
    lower_attend(case).compile()


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


@needs_libtpu
@pytest.mark.parametrize("calls", [1, 4])
def test_a_decode_writes_in_place_however_many_calls_its_batch_takes(calls):
    """Tables that SMEM cannot hold together make several calls."""
    long = {"num_seqs": 256, "num_tokens": 256, "max_context": 32768, "block_size": 16}
    case = DECODE if calls == 1 else replace(DECODE, **long)
    lowered = lower_attend(case)
    assert lowered.as_text().count("tpu_custom_call") == calls
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    pool_bytes = 2 * np.prod(kv_cache.pool_shape(4096, case.num_kv_heads, case.block_size, case.head_dim, "tpu"))
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 20


def test_the_clock_follows_from_the_published_peak():
    ghz = {name: round(chip.clock_hz / 1e9, 2) for name, chip in chips.CHIPS.items()}
    assert ghz == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
