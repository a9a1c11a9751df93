"""The GPU kernels through the true compiler, for chips that are not here: no spills, and the instructions meant."""

import concurrent.futures
import os

import pytest

from jaxvllm.aot import gpu_chips
from tools.gpu import compile as gpu_compile
from tools.gpu.compile import PHASES, SHAPES, Report, Shape, compile_kernels

# a program for a chip that is not here goes into the compilation cache and cannot be read back: it is compiled again
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
needs_compiler = pytest.mark.skipif(gpu_chips.why_no_compiler() is not None, reason=str(gpu_chips.why_no_compiler()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_compiler
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_no_kernel_spills_or_lacks_its_instructions(chip, phase):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda shape: compile_kernels(chip, shape, phase), SHAPES.values()))
    reports = [report for kernels in found for report in kernels]
    assert {r.kernel for r in reports} == (
        {"paged_decode", "paged_decode_combine"} if phase == "decode" else {"paged_prefill"}
    )
    assert not [f"{r.shape}, {r.kernel}: {fault}" for r in reports for fault in r.faults()]
    assert all(0 < r.registers <= 255 for r in reports)
    assert all(r.shared_bytes <= 232_448 for r in reports)


@pytest.mark.slow
@needs_compiler
def test_a_step_updates_its_donated_pool_in_place():
    """8,192 tokens written, then attended to: the pool is an alias, and no temporary is as large."""
    import jax
    import jax.numpy as jnp

    from jaxvllm.kernels import kv_cache, paged_attention

    S, T, N, K, H, P, M = 16, 8192, 16, 8, 128, 256, 32
    pool_shape = kv_cache.pool_shape(4096, K, P, H, "gpu")

    def step(pool, q, k, v, slots, tables, lens, cu, num_seqs):
        pool = paged_attention.write(pool, k, v, slots, backend="gpu")
        return pool, paged_attention.attend(q, pool, tables, lens, cu, num_seqs, scale=0.1, backend="gpu")

    shapes = [(pool_shape, "bfloat16"), ((T, N, H), "bfloat16"), *[((T, K, H), "bfloat16")] * 2]
    shapes += [((T,), "int32"), ((S, M), "int32"), ((S,), "int32"), ((S + 1,), "int32"), ((1,), "int32")]
    lowered = gpu_chips.lower_for(
        "h200", step, *(jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in shapes), donate=(0,)
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    pool_bytes = 2 * 4096 * K * P * 2 * H
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 200 * 2**20 < pool_bytes


@pytest.mark.slow
@needs_compiler
def test_a_compile_past_its_time_limit_is_reported():
    with pytest.raises(RuntimeError, match=r"no end after 0\.1 s"):
        compile_kernels("h200", SHAPES["qwen3-0.6b"], "decode", time_limit_s=0.1)


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="'h300' is none of a100, b200, h100, h200"):
        gpu_chips.mesh_of("h300")


def test_faults_are_named():
    report = Report(
        chip="h200",
        shape=str(Shape(num_heads=2, num_kv_heads=1, head_dim=64)),
        kernel="paged_decode",
        registers=100,
        spilled_bytes=8,
        shared_bytes=1024,
        compile_s=1.0,
        instructions={"tma_loads": 4, "tma_stores": 1, "wgmmas": 0},
    )
    assert report.faults() == ["8 bytes spilled", "no wgmmas"]
    row = "| h200 | N2 K1 H64 P256 bfloat16 | paged_decode | 100 | 8 | 1,024 | 4/1 | 0 | 1.0 |"
    assert gpu_compile.as_row(report) == row
