"""What a measurement has to say about where it was taken, and what that machine can do at best."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PACKAGES = ("jaxvllm", "jax", "jaxlib", "flax", "numpy")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")  # those that decide how fast products are
_COPY_BYTES = 256 * 2**20
_PRODUCT_SIZE = 1536  # rows, columns and inner size of the product that measures operations


def describe() -> dict[str, Any]:
    """Command, hardware, versions, commit and date: the same keys in every JSON line."""
    return {
        "command": _command(sys.argv),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute: other work, where it exceeds ours
    }


def copy_bandwidth(repeats: int = 5) -> float:
    """Bytes per second, read and written, of one large array copied on JAX's device; the best of some tries."""
    x = jnp.zeros(_COPY_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: a fresh result would be page-faulted in
    return 2 * _COPY_BYTES / _best_s(copy, x, repeats)


def product_rate(dtype: str, repeats: int = 3) -> float:
    """Operations per second of one large matrix product, the best of some tries."""
    n = _PRODUCT_SIZE
    weight = jnp.ones((n, n), dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(partial(jnp.matmul, weight, precision=precision))
    return 2 * n**3 / _best_s(product, jnp.ones((n, n), dtype), repeats)


def _best_s(function: Any, x: jax.Array, repeats: int) -> float:
    """Seconds of one call; each takes what the one before gave."""
    x = function(x).block_until_ready()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        x = function(x).block_until_ready()
        times.append(perf_counter() - start)
    return float(np.min(times))


def _command(words: list[str]) -> str:
    """The command line, of paths from the root or a home their last part: the rest is the machine owner's."""
    program = Path(words[0]).name
    return shlex.join(["jaxvllm" if program == "__main__.py" else program, *map(_without_home, words[1:])])


def _without_home(word: str) -> str:
    option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    return option + equals + (value.rpartition("/")[2] if value.startswith(("/", "~")) else value)


def _hardware() -> dict[str, Any]:
    device = jax.devices()[0]
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in lines.items()}
    flags = values.get("flags", "").split()
    return {
        "cpu": values.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "device": device.device_kind,
        "platform": device.platform,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
