"""`python -m tools.gpu.check`: the whole of it dry, and that what fails is seen and leaves the rest alone."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.kernels import kv_cache, paged_attention
from tools.gpu import check as gpu_check
from tools.gpu import numerics as gpu_numerics
from tools.gpu import timing as gpu_timing
from tools.gpu.record import Record, read_record
from tools.gpu.workloads import Workload, make_batches

ROOT = Path(__file__).parents[1]
# a machine that lends a GPU may have none of these
ABSENT = ("click", "gguf", "huggingface_hub", "jinja2", "tokenizers", "transformers", "hypothesis", "pytest")
BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)
sys.meta_path.insert(0, Absent())
"""
SMALL = Workload(context_lens=(20, 7, 0), num_new=(9, 1, 0), num_heads=2, num_kv_heads=1, head_dim=64)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dry_run_passes_every_part_with_few_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    command = [sys.executable, "-m", "tools.gpu.check", "--interpret", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["parts"]
    assert {name: part["failed"] for name, part in parts.items()} == {name: [] for name in gpu_check.PARTS}
    assert all(part["passed"] for part in parts.values())
    assert len(parts["numerics"]["results"]) == 2
    timed = {name for name, result in parts["decode"]["results"].items() if result.get("median_s", 0) > 0}
    assert {"tiny: gpu", "tiny: xla", "tiny: triton, 1 parts"} <= timed
    assert {"tiny: gpu", "tiny: xla"} <= parts["prefill"]["results"].keys()
    (engine,) = parts["engine"]["results"].values()
    assert engine["complete"]
    assert engine["num_tokens"] > 0
    assert engine["decode_floor_s"] > 0
    assert 0 <= engine["host_gap_s_per_step"] <= engine["host_s_per_step"] < engine["run_s"]


def _xla(*arguments, **options):
    return paged_attention.attend(*arguments, **options, backend="xla")


def _one_token_short(q, pool, tables, context_lens, *rest, **options):
    return _xla(q, pool, tables, jnp.maximum(context_lens - 1, 0), *rest, **options)


def _one_token_too_many(q, pool, tables, context_lens, *rest, **options):
    return _xla(q, pool, tables, jnp.where(context_lens > 0, context_lens + 1, 0), *rest, **options)


def test_the_numerics_pass_what_is_right():
    for workload in (gpu_numerics.decode_of(SMALL), replace(SMALL, dtype="float16", sliding_window=5)):
        result = gpu_numerics.compare(workload, _xla, seed=3)
        assert result["passed"], result


@pytest.mark.parametrize("fault", [_one_token_short, _one_token_too_many])
def test_the_numerics_fail_what_is_wrong(tmp_path, fault):
    record = Record(tmp_path, "numerics")
    record.run("small", gpu_numerics.compare, SMALL, fault, 3)
    assert not record.results["small"]["passed"]
    assert not gpu_numerics.passed(record.results)


def test_what_fails_is_recorded_and_the_next_check_runs(tmp_path):
    record = Record(tmp_path, "part")
    record.run("bad", lambda: {}["absent"])
    record.run("good", lambda: {"median_s": 1.0})
    assert "KeyError: 'absent'" in record.results["bad"]["error"]
    assert read_record(tmp_path, "part") == record.results
    assert record.results["good"]["median_s"] == 1.0


def _options(folder) -> argparse.Namespace:
    return argparse.Namespace(out=folder, seed=1, interpret=True)


def test_a_part_that_hangs_is_killed_and_said_so(tmp_path):
    outcome = gpu_check._run_child("card", _options(tmp_path), 0.05)
    assert not outcome["passed"]
    assert "killed" in outcome["ended"]


def test_a_part_after_the_time_limit_is_left_out(tmp_path):
    outcome = gpu_check._run_child("card", _options(tmp_path), -1.0)
    assert not outcome["passed"]
    assert "left out" in outcome["ended"]


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_is_that_of_the_numerics(tmp_path, monkeypatch, capsys, passed, status):
    def run_child(part, *_):
        return {"results": {}, "passed": passed if part == "numerics" else False, "failed": [], "ended": ""}

    monkeypatch.setattr(gpu_check, "_run_child", run_child)
    assert gpu_check.main(["--out", str(tmp_path)]) == status
    assert "numerics: " + ("passed" if passed else "NOT PASSED") in capsys.readouterr().out


def test_without_a_gpu_a_part_says_so(tmp_path):
    options = argparse.Namespace(out=tmp_path, seed=1, interpret=False)
    with pytest.raises(ValueError, match="need a GPU: --interpret"):
        gpu_check._run_part("card", options)


def test_batches_poison_all_that_no_token_may_look_at():
    batches = make_batches(SMALL, backend="gpu", copies=2, poison=True, spare_rows=2)
    pool, P = np.asarray(batches.pool, np.float32), SMALL.block_size
    live = np.zeros(pool.shape[:3], bool)
    for r in range(2):
        for s in range(5):
            n, table = int(batches.lens[r, s]), np.asarray(batches.tables[r, s])
            keys, _ = kv_cache.read(batches.pool, jnp.asarray(table), n, SMALL.head_dim)
            assert np.isfinite(np.asarray(keys, np.float32)).all()
            for token in range(n):
                live[table[token // P], :, token % P] = True
    assert np.isnan(pool[~live]).all()
    assert live.sum() == 2 * sum(SMALL.context_lens)
    assert np.isnan(np.asarray(batches.q[-2:], np.float32)).all()


def test_a_workload_counts_its_bytes_and_operations():
    decode = Workload(context_lens=(100, 50), num_heads=4, num_kv_heads=2, head_dim=64)
    assert decode.num_bytes == 2 * (2 * 150 * 2 * 64 + 2 * 2 * 4 * 64)
    assert decode.flops == 4 * 150 * 4 * 64
    chunk = Workload(context_lens=(5,), num_new=(3,), num_heads=4, num_kv_heads=2, head_dim=64)
    assert chunk.flops == 4 * (3 + 4 + 5) * 4 * 64


def test_a_timed_loop_runs_every_call_and_once_before_the_clock_starts():
    seen = []

    def step(i, x, total):
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        return x + total

    timed = gpu_timing.time_calls(step, jnp.zeros(()), jnp.ones(()), calls=3, repeats=2)
    jax.effects_barrier()
    assert sorted(seen) == sorted([0, 1, 2] * (1 + 2))
    assert 0 < timed["min_s"] <= timed["median_s"] <= timed["max_s"]


def test_the_cards_rates_are_measured():
    assert gpu_timing.copy_bandwidth(2**16, repeats=1)["bytes_per_s"] > 0
    assert gpu_timing.matrix_rate(64, repeats=1)["flops_per_s"] > 0
