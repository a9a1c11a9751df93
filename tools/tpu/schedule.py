"""The compiler's final schedule of a TPU kernel, read without a device: cycles per region of its code.

`python -m tools.tpu.schedule CASE_JSON` compiles in a process of its own, since the dump must be asked for before
libtpu loads; `read_schedule` starts it. A bundle is what a core issues in one cycle.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_TIMEOUT_S = 600
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|\d+) +(LH|LB|LE|PB|PF|CT)?: *(>*)")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a kernel is compiled for; `kernel` is "decode" or "ragged"."""

    chip: str
    kernel: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_context: int
    num_seqs: int
    num_tokens: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Region:
    """A stretch of code without branches: loop depth, whether a loop begins here, cycles, uses of the matrix units."""

    depth: int
    begins_loop: bool
    bundles: int
    mxu: int


def read_schedule(case: Case) -> tuple[list[Region], float]:
    """Returns the kernel's regions in order, and the seconds its compilation took."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.tpu.schedule", json.dumps(asdict(case))],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the schedule of {case} was not read:\n{done.stderr[-2000:]}")
    regions, seconds = json.loads(done.stdout.splitlines()[-1])
    return [Region(*region) for region in regions], seconds


def parse(bundles: str, utilization: str) -> Iterator[Region]:
    """Splits the text of the final bundles where a branch may land; `utilization` has a row per bundle."""
    mxu = [int(line.split()[0]) for line in utilization.splitlines()[4:] if line.strip()]
    marks = []
    count = 0
    for line in bundles.splitlines():
        if match := _BUNDLE.match(line):
            if match[1]:
                marks.append((count, match[1] == "LB", len(match[2])))
            count += 1
    marks.append((count, False, 0))
    for (begin, begins_loop, depth), (end, _, _) in itertools.pairwise(marks):
        yield Region(depth, begins_loop, end - begin, sum(mxu[begin:end]))


def _compile_and_parse(case: Case, folder: Path) -> tuple[list[Region], float]:
    from tools.tpu.kernel import lower_attend  # which imports this module

    lowered = lower_attend(case)
    begin = time.perf_counter()
    lowered.compile()
    seconds = time.perf_counter() - begin
    name = f"paged_{case.kernel}"
    bundles = [p for p in sorted(folder.glob(f"*{name}*final_bundles.txt")) if "schedule-analysis" not in p.name]
    utilization = sorted(folder.glob(f"*{name}*final_hlo-static-per-bundle-utilization.txt"))
    return list(parse(bundles[-1].read_text(), utilization[-1].read_text())), seconds


def _main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        regions, seconds = _compile_and_parse(Case(**json.loads(sys.argv[1])), Path(folder))
    print(json.dumps([[[r.depth, r.begins_loop, r.bundles, r.mxu] for r in regions], seconds]))


if __name__ == "__main__":
    _main()
