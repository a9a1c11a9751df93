"""Every form of the TPU kernels through the real compiler: `python -m tools.tpu.compile_matrix CHIP ...`."""

import itertools
import sys
import time
from collections.abc import Iterator

from tools.tpu.kernel import lower_attend
from tools.tpu.schedule import Case

HEADS = {"8:1": (64, 8), "4:1": (32, 8), "1:1": (8, 8)}
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")


def cases(chip: str) -> Iterator[tuple[str, Case]]:
    """Yields the forms a chip must compile: a decode of 64 sequences, a prefill of 1,024 tokens."""
    for (ratio, (N, K)), H, P, dtype in itertools.product(HEADS.items(), HEAD_DIMS, BLOCK_SIZES, DTYPES):
        for kernel, tokens, seqs in (("decode", 64, 64), ("ragged", 1024, 16)):
            yield (
                ratio,
                Case(
                    chip=chip,
                    kernel=kernel,
                    num_heads=N,
                    num_kv_heads=K,
                    head_dim=H,
                    block_size=P,
                    max_context=2048,
                    num_seqs=seqs,
                    num_tokens=tokens,
                    dtype=dtype,
                ),
            )


def compile_seconds(case: Case) -> float:
    """Returns the CPU seconds that the compiler took, which other work does not lengthen; raises what it raised."""
    lowered = lower_attend(case)
    begin = time.process_time()
    lowered.compile()
    return time.process_time() - begin


def _main():
    for chip in sys.argv[1:]:
        for (ratio, H, dtype, kernel), group in itertools.groupby(
            sorted(cases(chip), key=lambda c: (c[0], c[1].head_dim, c[1].dtype, c[1].kernel)),
            key=lambda c: (c[0], c[1].head_dim, c[1].dtype, c[1].kernel),
        ):
            seconds = [f"{compile_seconds(case):.1f}" for _, case in group]
            print(f"| {chip} | {kernel} | {ratio} | {H} | {dtype} | {' | '.join(seconds)} |", flush=True)


if __name__ == "__main__":
    _main()
