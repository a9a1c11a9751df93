"""`jaxvllm bench start`: from a new process to its first token, with an empty compilation cache and with a full one."""

import json
import os
import subprocess
import sys
import tempfile
from time import perf_counter
from typing import Any

from jaxvllm.bench.machine import describe

_CHILD = """
import json, sys
from jaxvllm.bench.measure import make_engine, run_requests
from jaxvllm.bench.requests import single
from jaxvllm.bench.throughput import engine_options, start_figures
arguments = json.loads(sys.stdin.read())
engine, _ = make_engine(**arguments)
run_requests(engine, single(engine.model_config.vocab_size, max_tokens=1))
print(json.dumps({"start": start_figures(engine), "configuration": engine_options(engine)}))
"""


def measure(*, model: str | None, random: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of both starts and what they compiled: two processes, one cache folder of their own."""
    options = options | {"enforce_eager": False}
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (_start(folder, {"model": model, "random": random, "options": options}) for _ in range(2))
    name = model.rsplit("/", 1)[-1] if model else random
    ratio = warm["first_token_s"] / cold["first_token_s"]
    programs = cold["start"]["num_programs"]
    return {
        "benchmark": "start",
        "title": f"start to first token, {name}, {programs} programs",
        "summary": f"{cold['first_token_s']:.1f} s cold, {warm['first_token_s']:.1f} s warm ({ratio:.2f})",
        "machine": describe(),
        "configuration": cold.pop("configuration"),
        "cold": cold,
        "warm": {name: value for name, value in warm.items() if name != "configuration"},
        "warm_over_cold": round(ratio, 3),
    }


def _start(cache: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs a process with that compilation cache to its first token; raises OSError when it fails."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
    start = perf_counter()
    command = [sys.executable, "-c", _CHILD]
    done = subprocess.run(
        command, input=json.dumps(arguments), env=environment, capture_output=True, text=True, cwd=os.getcwd()
    )
    seconds = perf_counter() - start
    if done.returncode:
        raise OSError(f"the engine did not start: {done.stderr.strip().splitlines()[-1]}")
    return {"first_token_s": round(seconds, 2), **json.loads(done.stdout.strip().splitlines()[-1])}
