"""Whole steps through the true compilers, for chips that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxvllm.aot import chips, gpu_chips
from jaxvllm.aot.compile import compile_steps, find_target
from jaxvllm.config import EngineConfig

_TPU, _GPU = chips.why_no_compiler(), gpu_chips.why_no_compiler()
needs_libtpu = pytest.mark.skipif(_TPU is not None, reason=str(_TPU))
needs_cuda = pytest.mark.skipif(_GPU is not None, reason=str(_GPU))
CONFIGS = Path(__file__).parent / "data" / "hf_configs"
TARGETS = [pytest.param(chip, marks=needs_libtpu) for chip in ("v5e-1", "v6e-1", "v5p-1", "tpu7x-1", "v6e-4")]
TARGETS += [pytest.param(chip, marks=needs_cuda) for chip in ("h100-1", "h200-1", "h100-4")]


@pytest.fixture
def tiny_config(tmp_path):
    """Qwen3-0.6B with two layers and a small vocabulary: a folder without weights."""
    config = json.loads((CONFIGS / "qwen3_0_6b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "vocab_size": 512}))
    return tmp_path


def reports(chip, path, **options):
    """Compiles in a process of its own: the compilers read the environment once, and may crash."""
    code = f"""
import json, sys
from dataclasses import asdict
from pathlib import Path
from jaxvllm.aot.compile import compile_steps
from jaxvllm.config import EngineConfig
path = {str(path)!r}
for step in compile_steps({chip!r}, Path(path), EngineConfig(model=path, **{options!r})):
    print(json.dumps({{**asdict(step), "fits": step.fits}}))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=1500, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("chip", TARGETS)
def test_whole_steps_compile_and_update_their_cache_in_place(tiny_config, chip):
    steps = reports(
        chip, tiny_config, kvcache_block_size=64, max_num_batched_tokens=256, max_num_seqs=16, max_model_len=1024
    )
    assert len(steps) == 2
    for step in steps:
        assert step["backend"].partition(":")[0] == ("gpu" if chip.startswith("h") else "tpu")
        assert step["alias_bytes"] == step["pool_bytes"]
        assert step["fits"]
        assert step["temp_bytes"] < step["pool_bytes"] // 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_libtpu
def test_a_real_model_compiles_without_its_weights():
    """Qwen3-0.6B on v6e; the larger ones are in docs/benchmarks/kernels, by the same command."""
    steps = reports("v6e-1", CONFIGS / "qwen3_0_6b", max_num_batched_tokens=1024, max_num_seqs=64, max_model_len=2048)
    assert [step["name"] for step in steps] == ["prefill 1024 tokens", "decode 64 tokens"]
    for step in steps:
        assert step["alias_bytes"] == step["pool_bytes"] > 10 * 2**30
        assert step["fits"]


@pytest.mark.slow
@needs_libtpu
def test_a_model_too_large_for_the_chip_is_said_not_to_fit(tiny_config):
    config = json.loads((tiny_config / "config.json").read_text())
    (tiny_config / "config.json").write_text(json.dumps({**config, "vocab_size": 20_000_000}))  # 41 GB of embedding
    steps = reports("v6e-1", tiny_config, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256)
    assert [step["fits"] for step in steps] == [False, False]
    assert all("exceeds available HBM" in step["refusal"] for step in steps)
    assert all(step["argument_bytes"] > step["hbm_bytes"] for step in steps)


def test_chips_that_cannot_be_compiled_for_are_refused():
    for spec in ("v4-1", "v6e", "v6e-0", "h100-x"):
        with pytest.raises(ValueError, match=f"chip '{spec}' is none of v5e, v5p, v6e, tpu7x, a100, .* as in v6e-1"):
            find_target(spec)


@needs_libtpu
def test_more_chips_than_the_heads_can_be_shared_out_to_are_refused(tiny_config):
    with pytest.raises(ValueError, match="v6e-8: programs are compiled for up to 4"):
        find_target("v6e-8")
    config = json.loads((tiny_config / "config.json").read_text())
    (tiny_config / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(ValueError, match="2 KV heads cannot be shared out to 4 chips"):
        next(iter(compile_steps("v6e-4", tiny_config, EngineConfig(model=str(tiny_config)))))
