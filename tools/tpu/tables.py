"""What the TPU kernels should cost: `python -m tools.tpu.tables [predictions | prefills | comparison] ...`.

Needs libtpu and no device; nothing in them is a measurement of one.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxvllm.aot.chips import CHIPS, mesh_of
from tools.tpu import kernel
from tools.tpu.schedule import Case

BLOCK_SIZE = 256  # starting a copy costs the same whatever its size: large blocks suit a TPU


def predictions() -> Iterator[str]:
    """Yields a row for each chip, share of a model and workload: what bounds the kernel, by count and schedule."""
    columns = "bytes / floor | sub-chunk: cycles / copy | all: cycles / copy | predicted | bound |"
    yield f"| chip | heads | workload | {columns}"
    yield "|---|---|---|---|---|---|---|---|"
    for chip in CHIPS:
        for (N, K, H), workload in ((heads, w) for heads in kernel.HEADS.values() for w in kernel.WORKLOADS):
            r = kernel.decode_report(chip, (N, K, H), workload, BLOCK_SIZE)
            bound = "copies" if r["compute_over_copy"] < 1 else "compute"
            yield (
                f"| {chip} | {N}/{K} | decode, {workload} | {r['attention_bytes_ratio']:.3f} "
                f"| {r['sub_chunk_cycles']:,} / {r['sub_chunk_copy_cycles']:,.0f} = {r['sub_chunk_ratio']:.2f} "
                f"| {r['compute_over_copy']:.2f} "
                f"| {1e6 * r['predicted_s']:,.0f} us | {bound} |"
            )


def prefills() -> Iterator[str]:
    """Yields a row for each chip and share of a model: a prompt of 4,096 tokens against the matrix units' floor."""
    yield "| chip | heads | tile | a head's whole chunk, cycles / floor | with edges and tiles | copies / products |"
    yield "|---|---|---|---|---|---|"
    for chip in CHIPS:
        for N, K, H in kernel.HEADS.values():
            r = kernel.prefill_report(chip, (N, K, H), 4096, BLOCK_SIZE)
            yield (
                f"| {chip} | {N}/{K} | {r['tile'][0]} x {r['tile'][1]:,} | {r['fold_cycles']:,.0f} / "
                f"{r['mxu_floor_cycles']:,.0f} = {r['fold_over_floor']:.2f} | {r['all_over_floor']:.2f} "
                f"| {r['copy_over_products']:.2f} |"
            )


def comparison(chip: str = "v6e") -> Iterator[str]:
    """Yields what our kernel and JAX's own cost for Qwen3-8B, both compiled for one chip."""
    N, K, H = kernel.HEADS["Qwen3-8B"]
    yield "| batch | kernel | bytes moved / floor | VMEM | compile time, CPU |"
    yield "|---|---|---|---|---|"
    for title, form, tokens, seqs, context in (
        ("decode, nano", "decode", 256, 256, 1024),
        ("decode, long", "decode", 16, 16, 32768),
        ("prefill, 4,096 tokens", "ragged", 4096, 16, 4096),
    ):
        case = Case(
            chip=chip, kernel=form, num_heads=N, num_kv_heads=K, head_dim=H, block_size=64, max_context=context,
            num_seqs=seqs, num_tokens=tokens,
        )  # fmt: skip
        ours = "jaxvllm", kernel.our_attend, kernel.lower_attend
        theirs = "JAX", kernel.jax_attend, kernel.lower_jax_attend
        for (name, make, lower), ratio in zip((ours, theirs), _ratios(case, title), strict=True):
            begin = time.process_time()
            lower(case).compile()
            seconds = time.process_time() - begin
            vmem = vmem_bytes(chip, *make(case)) / 2**20
            yield f"| {title} | {name} | {ratio:.2f} | {vmem:.1f} MiB | {seconds:.1f} s |"


def _ratios(case: Case, title: str) -> tuple[float, float]:
    """Bytes that the two kernels move, over each live key and value once."""
    if case.kernel == "decode":
        lens = kernel.context_lens(title.removeprefix("decode, "))
        trips = kernel.count_decode(lens, case)
        ours, theirs, floor = trips.kv_bytes + trips.io_bytes, kernel.count_jax_decode(lens, case), trips.floor_bytes
    else:
        ours, theirs = kernel.count_prefill(case), kernel.count_jax_prefill(case)
        floor = 2 * case.num_tokens * case.num_kv_heads * case.head_dim * jnp.dtype(case.dtype).itemsize
    return ours / floor, theirs / floor


def vmem_bytes(chip: str, attend: Callable, arguments: list[jax.ShapeDtypeStruct]) -> int:
    """Returns what the kernels of a program ask of VMEM at a time: scratch, and two windows of each tiled operand."""
    with jax.set_mesh(mesh_of(chip)):
        program = jax.make_jaxpr(attend)(*arguments)
    return max(
        sum(_ref_bytes(ref.aval) for ref in call.params["jaxpr"].invars) for call in _pallas_calls(program.jaxpr)
    )


def _ref_bytes(ref: Any) -> int:
    space = str(ref.memory_space).rpartition(".")[2].lower()
    copies = {"vmem": 1, "none": 2, "default": 2}.get(space, 0)
    return copies * ref.size * ref.dtype.itemsize if copies else 0


def _pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _pallas_calls(inner)


def _main():
    tables = {"predictions": predictions, "prefills": prefills, "comparison": comparison}
    for name in sys.argv[1:] or tables:
        for row in tables[name]():
            print(row, flush=True)
        print(flush=True)


if __name__ == "__main__":
    _main()
