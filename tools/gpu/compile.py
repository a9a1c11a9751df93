"""Compiles the GPU kernels for chips that are not here and reports what the compiler made of them.

    python -m tools.gpu.compile --chip h100 --chip h200 [--out DIR]

Each kernel is compiled in a process of its own with a time limit: the compiler's search for register layouts may never
end. A row: registers per thread, bytes spilled, shared memory per thread block, compile time, and how often the
instructions meant stand in the PTX. Exits with 1 where a kernel spills, fails or lacks an instruction.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_TIME_LIMIT_S = 240
_INSTRUCTIONS = {
    "tma_loads": r"cp\.async\.bulk\.tensor\.\dd\.shared::(?:cta|cluster)\.global",
    "tma_stores": r"cp\.async\.bulk\.(?:tensor\.\dd\.)?global\.shared::cta",
    "wgmmas": r"wgmma\.mma_async\.sync",
}
_REQUIRED = {
    "paged_decode": ("tma_loads", "wgmmas"),
    "paged_decode_combine": ("tma_stores",),
    "paged_prefill": ("tma_loads", "tma_stores", "wgmmas"),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's attention: what a kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 256
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    def __str__(self):
        extra = [f"w{self.sliding_window}"] if self.sliding_window else []
        extra += [f"cap{self.logits_soft_cap:g}"] if self.logits_soft_cap else []
        return " ".join(
            [f"N{self.num_heads} K{self.num_kv_heads} H{self.head_dim} P{self.block_size} {self.dtype}", *extra]
        )


SHAPES = {
    "qwen3-0.6b": Shape(num_heads=16, num_kv_heads=8, head_dim=128),
    "qwen3-0.6b, blocks of 16": Shape(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16),
    "qwen3-32b on 4 chips": Shape(num_heads=16, num_kv_heads=2, head_dim=128, block_size=64),
    "llama-3.1-8b": Shape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=32),
    "llama-3.2-1b": Shape(num_heads=32, num_kv_heads=8, head_dim=64, block_size=128),
    "smollm2-135m": Shape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype="float16"),
    "one head each": Shape(num_heads=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16"),
    "sixteen heads each": Shape(num_heads=16, num_kv_heads=1, head_dim=128, block_size=128),
    "windowed": Shape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, sliding_window=4096),
    "windowed and capped": Shape(
        num_heads=28, num_kv_heads=4, head_dim=128, block_size=16, sliding_window=4096, logits_soft_cap=50.0
    ),
    "heads of 256": Shape(num_heads=8, num_kv_heads=1, head_dim=256, block_size=32),
    "gemma-3-1b": Shape(num_heads=4, num_kv_heads=1, head_dim=256, block_size=64, sliding_window=512),
    "gemma-2-2b": Shape(
        num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, sliding_window=4096, logits_soft_cap=50.0
    ),
    # no model's: the corners, where registers and shared memory are scarcest
    "all of it, heads of 64": Shape(
        num_heads=16,
        num_kv_heads=1,
        head_dim=64,
        block_size=256,
        dtype="float16",
        sliding_window=300,
        logits_soft_cap=30.0,
    ),
    "all of it, heads of 128": Shape(
        num_heads=16, num_kv_heads=1, head_dim=128, block_size=16, sliding_window=300, logits_soft_cap=30.0
    ),
    "all of it, heads of 256": Shape(
        num_heads=16,
        num_kv_heads=1,
        head_dim=256,
        block_size=256,
        dtype="float16",
        sliding_window=300,
        logits_soft_cap=30.0,
    ),
    "one head of 256 each": Shape(
        num_heads=2, num_kv_heads=2, head_dim=256, block_size=16, sliding_window=300, logits_soft_cap=30.0
    ),
}
PHASES = ("decode", "prefill")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler made of one kernel."""

    chip: str
    shape: str
    kernel: str
    registers: int
    spilled_bytes: int  # stores, per thread
    shared_bytes: int  # per thread block
    compile_s: float
    instructions: dict[str, int] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Returns what is wrong with it."""
        missing = [name for name in _REQUIRED[self.kernel] if not self.instructions[name]]
        spills = [f"{self.spilled_bytes} bytes spilled"] if self.spilled_bytes else []
        return spills + [f"no {name}" for name in missing]


def compile_kernels(chip: str, shape: Shape, phase: str, *, time_limit_s: float = _TIME_LIMIT_S) -> list[Report]:
    """Compiles one phase of one shape in a process of its own; raises RuntimeError where it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tools.gpu.compile", "--chip", chip, "--phase", phase]
        command += ["--one", json.dumps(asdict(shape))]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": folder}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # an answer of the cache dumps nothing
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{phase} of {shape} for {chip}: no end after {time_limit_s} s.") from None
        if done.returncode:
            raise RuntimeError(f"{phase} of {shape} for {chip}: {done.stderr[-2000:]}")
        compile_s = json.loads(done.stdout.splitlines()[-1])["compile_s"]
        return [
            _read_report(path, chip=chip, shape=str(shape), compile_s=compile_s)
            for path in sorted(Path(folder).glob("*.ptxas"))
        ]


def _read_report(path: Path, *, chip: str, shape: str, compile_s: float) -> Report:
    """Reads what the compiler dumped of one kernel: `NAME_0.ptxas` and its neighbours."""
    log, ptx = path.read_text(), path.with_suffix(".ptx").read_text()
    resources = path.with_suffix(".resources.txt").read_text()
    return Report(
        chip=chip,
        shape=shape,
        kernel=path.stem.rpartition("_")[0],
        registers=_number(r"Used (\d+) registers", log),
        spilled_bytes=_number(r"(\d+) bytes spill stores", log),
        shared_bytes=_number(r"smem_scratch_bytes=(\d+)", resources),
        compile_s=round(compile_s, 1),
        instructions={name: len(re.findall(pattern, ptx)) for name, pattern in _INSTRUCTIONS.items()},
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's dump has no {pattern!r}: another version of JAX writes it otherwise.")
    return int(found[1])


def _compile_here(chip: str, shape: Shape, phase: str) -> float:
    """Compiles one phase in this process; returns the seconds."""
    import jax
    import jax.numpy as jnp

    from jaxvllm.aot.gpu_chips import lower_for
    from jaxvllm.kernels import kv_cache
    from jaxvllm.kernels.gpu import decode as gpu_decode
    from jaxvllm.kernels.gpu import prefill as gpu_prefill

    S, M, T = 64, -(-4096 // shape.block_size), 1024
    dtype = jnp.dtype(shape.dtype)
    pool = kv_cache.pool_shape(2048, shape.num_kv_heads, shape.block_size, shape.head_dim, "gpu")
    rows = S if phase == "decode" else T
    arguments: list[Any] = [((rows, shape.num_heads, shape.head_dim), dtype), (pool, dtype)]
    arguments += [((S, M), jnp.int32), ((S,), jnp.int32), ((S + 1,), jnp.int32)]
    options: dict[str, Any] = {
        "scale": shape.head_dim**-0.5,
        "sliding_window": shape.sliding_window,
        "logits_soft_cap": shape.logits_soft_cap,
    }

    def run(q, pool, tables, lens, cu):
        if phase == "decode":
            return gpu_decode.decode(q, pool, tables, lens, lens > 0, **options)
        return gpu_prefill.prefill(q, pool, tables, lens, cu, **options)

    start = time.perf_counter()
    lower_for(chip, run, *(jax.ShapeDtypeStruct(*a) for a in arguments)).compile()
    return time.perf_counter() - start


TABLE_HEAD = """\
| chip | shape | kernel | registers | spilled bytes | shared bytes | TMA in/out | wgmma | compile s |
|---|---|---|---:|---:|---:|---:|---:|---:|"""


def as_row(r: Report) -> str:
    """Returns a report as a row of a table in Markdown."""
    n = r.instructions
    return (
        f"| {r.chip} | {r.shape} | {r.kernel} | {r.registers} | {r.spilled_bytes} | {r.shared_bytes:,} "
        f"| {n['tma_loads']}/{n['tma_stores']} | {n['wgmmas']} | {r.compile_s} |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.compile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", action="append", help="h100, h200, ...; may be repeated (default: both)")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: all)")
    parser.add_argument("--phase", choices=PHASES, help="default: both")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    parser.add_argument("--out", type=Path, help="a folder for gpu_compile.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the child process's shape
    options = parser.parse_args(arguments)
    if options.one:
        print(
            json.dumps({"compile_s": _compile_here(options.chip[0], Shape(**json.loads(options.one)), options.phase)})
        )
        return 0

    chips = options.chip or ["h100", "h200"]
    phases = [options.phase] if options.phase else PHASES
    jobs = [(c, SHAPES[s], p) for c in chips for s in options.shape or SHAPES for p in phases]
    reports: list[Report] = []
    print(TABLE_HEAD)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda job: compile_kernels(*job), jobs):
            reports += found
            print("\n".join(map(as_row, found)), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_compile.json").write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")
    faults = [f"{r.chip}, {r.shape}, {r.kernel}: {fault}" for r in reports for fault in r.faults()]
    print("\n".join(["", *faults, f"{len(reports)} kernels, {len(faults)} faults."]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
