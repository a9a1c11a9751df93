"""What the tests of the TPU's kernels share: forms, tiny tiles, interpret mode, faults planted in a kernel's text."""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest
from attention_cases import STATIC, Form
from jax.experimental.pallas import tpu as pltpu

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels.tpu import backend as paged_attention_tpu
from jaxvllm.kernels.tpu import tiles as tpu_tiles

# Tiles so small that some dozen tokens take several chunks, sub-chunks, tiles and pieces.
TINY = tpu_tiles.ChipRule(
    decode_units=4,
    decode_chunk=64,
    decode_sub_chunk=32,
    prefill_rows=128,
    prefill_chunk=64,
    prefill_sub_chunk=32,
    prefill_heads_at_once=2,
    sums_in_product=True,
)
FORM = Form(num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, max_tokens=72, max_seqs=5, max_blocks=8)
FORMS = {
    "float32": FORM,
    "bfloat16_one_kv_head": replace(FORM, dtype="bfloat16", num_kv_heads=1, max_seqs=6),
    "window_head_64": replace(FORM, head_dim=64, sliding_window=20),
    "capped_head_80": replace(FORM, head_dim=80, num_heads=9, num_kv_heads=3, logits_soft_cap=3.0),
    "block_32_no_groups": replace(FORM, dtype="bfloat16", num_kv_heads=8, block_size=32, max_blocks=5, head_dim=96),
    "head_256_groups_of_16": replace(FORM, dtype="bfloat16", num_heads=16, num_kv_heads=1, head_dim=256),
    "block_128_window": replace(FORM, block_size=128, max_blocks=3, sliding_window=100),
    "head_64_bfloat16": replace(FORM, dtype="bfloat16", head_dim=64, block_size=64, max_blocks=4),
}
FAST = ("float32",)
each_phase = pytest.mark.parametrize("decode_only", [False, True], ids=["ragged", "decode"])


def each_form(names):
    """Parametrizes with FORMS; what is not in `names` is slow."""
    marks = {name: () if name in names else pytest.mark.slow for name in FORMS}
    return pytest.mark.parametrize("form", [pytest.param(FORMS[n], id=n, marks=marks[n]) for n in FORMS])


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret mode with race detection, unwritten memory NaN, and the chips "tiny" and "tiny_two_cores"."""
    monkeypatch.setitem(tpu_tiles.CHIPS, "tiny", TINY)
    monkeypatch.setitem(tpu_tiles.CHIPS, "tiny_two_cores", replace(TINY, cores=2, sums_in_product=False))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)):
        yield


def compiled(body=paged_attention_tpu.attend, chip: str | None = "tiny"):
    return jax.jit(functools.partial(body, chip=chip), static_argnames=STATIC)


def compiled_step(chip: str | None = "tiny"):
    backend = "tpu" if chip is None else f"tpu:{chip}"
    return jax.jit(functools.partial(paged_attention.write_and_attend, backend=backend), static_argnames=STATIC)


def planted(module: types.ModuleType, changes: dict[str, str]) -> types.ModuleType:
    """Returns a copy of the module with its text changed; some change must apply."""
    text = inspect.getsource(module)
    faulty = functools.reduce(lambda text, change: text.replace(*change), changes.items(), text)
    assert faulty != text, "the kernel's text has moved on: plant the fault anew"
    copy = types.ModuleType(module.__name__)
    copy.__file__ = module.__file__
    exec(compile(faulty, f"<{module.__name__} with a fault>", "exec"), copy.__dict__)
    return copy
