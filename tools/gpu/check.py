"""Checks and times everything on the GPU at hand, without network, in under five minutes.

    python -m tools.gpu.check --out DIR [--interpret] [--part NAME ...] [--seed N]

Parts: the card (what its copies and matrix products reach), the kernels' numerics, decode, prefill, the engine. Each
runs in a process of its own with a time limit, so that one that fails, hangs or crashes leaves the others alone. What
is found is in DIR/gpu_check.json. Exits with 1 where the numerics fail.

`--interpret` is the dry run without a GPU: tiny shapes, the kernels interpreted on the CPU.

Needs jax, flax, numpy, xxhash, jaxtyping and tqdm; torch and transformers are not needed.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu.record import Record, read_record

PARTS = {"card": 40, "numerics": 120, "decode": 100, "prefill": 70, "engine": 130}  # and the seconds each may take
_LIMIT_S = 290  # of all of them
_INTERPRETER_SLACK = 3  # a dry run may share its cores with other tests
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "torch")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for gpu_check.json")
    parser.add_argument("--interpret", action="store_true", help="a dry run on the CPU, tiny shapes")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated (default: all)")
    parser.add_argument("--seed", type=int, help="of the numerics (default: a new one every time)")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)  # the child process's part
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.seed is None:
        options.seed = time.time_ns() % 2**31
    if options.here:
        _run_part(options.here, options)
        return 0

    begin, slack = time.perf_counter(), _INTERPRETER_SLACK if options.interpret else 1
    report: dict[str, Any] = {"seed": options.seed, "interpreted": options.interpret, **_facts(), "parts": {}}
    for part in options.part or PARTS:
        left = slack * _LIMIT_S - (time.perf_counter() - begin)
        report["parts"][part] = _run_child(part, options, min(slack * PARTS[part], left))
        report["seconds"] = round(time.perf_counter() - begin, 1)
        (options.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
        print("\n".join(_lines(part, report["parts"][part])), flush=True)
    print(f"{report['seconds']} s; all of it: {options.out / 'gpu_check.json'}")
    numerics = report["parts"].get("numerics")
    return 0 if numerics is None or numerics["passed"] else 1


def _run_child(part: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Runs one part in a process of its own; returns what it recorded and how it ended."""
    (options.out / f"{part}.json").unlink(missing_ok=True)
    if limit_s <= 0:
        return {"results": {}, "passed": False, "failed": [], "ended": "left out: the time was over"}
    command = [sys.executable, "-m", "tools.gpu.check", "--out", str(options.out.resolve()), "--here", part]
    command += ["--seed", str(options.seed), *(["--interpret"] if options.interpret else [])]
    begin, errors = time.perf_counter(), options.out / f"{part}.log"
    try:
        with errors.open("w") as log:
            status = subprocess.run(command, cwd=_ROOT, env=_environment(options), stderr=log, timeout=limit_s)
        ended = f"exit status {status.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"killed after {limit_s:.0f} s"
    results = read_record(options.out, part)
    failed = [name for name, result in results.items() if "error" in result or result.get("passed") is False]
    return {
        "results": results,
        "passed": bool(results) and not failed and ended == "exit status 0",
        "failed": failed,
        "ended": ended,
        "log_tail": errors.read_text()[-2000:] if ended != "exit status 0" else "",
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """The environment of a part's process."""
    if not options.interpret:
        return dict(os.environ)
    # the interpreter needs a thread of JAX's for each warpgroup that may wait for another
    return {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "8"}


def _run_part(part: str, options: argparse.Namespace):
    """Runs one part in this process."""
    import jax

    tiny, record = options.interpret, Record(options.out, part)
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda") and not tiny:
        raise ValueError(f"this is a {device.platform}, the checks need a GPU: --interpret runs them dry on the CPU.")
    card = read_record(options.out, "card")
    if part == "card":
        _measure_card(record, device, tiny=tiny)
    elif part == "numerics":
        from tools.gpu import numerics as gpu_numerics

        gpu_numerics.run(record, _attend(device, tiny), seed=options.seed, tiny=tiny)
    elif part == "engine":
        from tools.gpu import engine as gpu_engine

        gpu_engine.run(record, card=card, tiny=tiny)
    else:
        from tools.gpu import attention as gpu_attention

        gpu_attention.run(record, _attend(device, tiny), card=card, decode=part == "decode", tiny=tiny)


def _attend(device: Any, interpreted: bool) -> Callable[..., Any]:
    """Returns our kernels' `attend`, interpreted or for the device; where it cannot take them, a call says why."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxvllm.kernels import paged_attention
    from jaxvllm.kernels.gpu import backend as paged_attention_gpu

    if not interpreted:
        form = paged_attention.AttentionForm(16, 8, 128, 16, "bfloat16", device.compute_capability)
        reason = paged_attention_gpu.why_unsupported(form)
        return functools.partial(paged_attention.attend, backend="gpu") if reason is None else _refuse(reason)
    interpret = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    return functools.partial(paged_attention_gpu.attend, interpret=interpret, num_workers=3)


def _refuse(reason: str) -> Callable[..., Any]:
    """Returns a function that only raises: compiled for another chip, the kernels would end the process."""

    def refuse(*_, **__):
        raise ValueError(reason)

    return refuse


def _measure_card(record: Record, device: Any, *, tiny: bool):
    """Records what the card is and what it reaches."""
    from tools.gpu import timing as gpu_timing

    def describe() -> dict[str, Any]:
        return {
            "device": device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "platform_version": device.client.platform_version.partition("\n")[0],
        }

    record.run("card", describe)
    record.run("copy_bandwidth", gpu_timing.copy_bandwidth, 2**20 if tiny else 2**32, repeats=2 if tiny else 11)
    record.run("matrix_rate", gpu_timing.matrix_rate, 128 if tiny else 8192, repeats=2 if tiny else 11)


def _facts() -> dict[str, Any]:
    """Returns when, on what and with what this runs."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "versions": versions,
        "driver": _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv"),
    }


def _output(*command: str) -> str | None:
    """Returns what a command prints; None where it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _lines(part: str, outcome: dict[str, Any]) -> list[str]:
    """Returns the part's results for a reader."""
    found = [f"{part}: {'passed' if outcome['passed'] else 'NOT PASSED'}, {outcome['ended']}"]
    found += [f"  {line}" for line in outcome.get("log_tail", "").strip().splitlines()[-1:]]
    for name, result in outcome["results"].items():
        shown = {
            key: f"{value:.4g}" if isinstance(value, float) else value
            for key, value in result.items()
            if key not in ("seconds", "calls", "repeats", "min_s", "max_s")
        }
        found.append(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    return found


if __name__ == "__main__":
    sys.exit(main())
