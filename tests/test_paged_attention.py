"""The public op: which backend answers, and what is refused before anything runs."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Form, make_case

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels.paged_attention import resolve_backend

# without the checks that jaxtyping's import hook puts around them in tests: the op's own are tested here
unhooked_attend, unhooked_write = inspect.unwrap(paged_attention.attend), inspect.unwrap(paged_attention.write)


def bodies(monkeypatch, *names):
    """Leaves the backends `names`, whatever this version has."""
    monkeypatch.setattr(paged_attention, "_BODIES", {name: f"a.module.for_{name}" for name in names})


@pytest.mark.parametrize(
    ("platform", "backend"), [("cpu", "xla"), ("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "xla")]
)
def test_auto_follows_the_platform(monkeypatch, platform, backend):
    bodies(monkeypatch, "xla", "tpu", "gpu")
    assert resolve_backend("auto", platform) == backend


def test_auto_is_xla_where_the_platform_has_no_kernel(monkeypatch):
    bodies(monkeypatch, "xla")
    assert resolve_backend("auto", "tpu") == resolve_backend("auto", "gpu") == "xla"


def test_xla_may_be_asked_for_anywhere(monkeypatch):
    bodies(monkeypatch, "xla", "tpu")
    assert resolve_backend("xla", "tpu") == resolve_backend("xla", "cpu") == "xla"


def test_a_kernel_of_another_platform_is_refused(monkeypatch):
    bodies(monkeypatch, "xla", "tpu", "gpu")
    with pytest.raises(ValueError, match="attention_backend='tpu' needs a TPU, this is 'cpu'"):
        resolve_backend("tpu", "cpu")


@pytest.mark.parametrize("name", ["tpu", "triton"])
def test_a_kernel_that_is_not_there_is_refused(monkeypatch, name):
    bodies(monkeypatch, "xla")
    with pytest.raises(ValueError, match=f"{name!r} has no kernel in this version: use one of auto, xla"):
        resolve_backend(name, "tpu")


def attend(case, backend="xla", **changes):
    """Calls the op with `changes` to its arguments or options."""
    arguments = {"q": case.q, "pool": case.pool, **case.batch._asdict(), **case.form.options, **changes}
    del arguments["slot_mapping"]
    return unhooked_attend(**arguments, backend=backend)


def case(**changes):
    return make_case(Form(**changes), [9, 23], [9, 7], backend="xla")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_answer_has_the_dtype_of_the_queries(dtype):
    answer = attend(case(), q=jnp.zeros((48, 4, 16), dtype))
    assert answer.dtype == dtype


def test_a_backend_without_a_body_is_refused_by_name():
    for call in (attend, write):
        with pytest.raises(ValueError, match="'triton' has no kernel"):
            call(case(), backend="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((48, 5, 16))}, "5 query heads are not a multiple of the pool's 2"),
        ({"q": jnp.zeros((48, 4, 8))}, "a key and a value of head_dim=8 take 16"),
        ({"q": jnp.zeros((48, 64))}, r"q is \(48, 64\): needs \[T, N, H\]"),
        ({"pool": jnp.zeros((4, 2, 4, 32), jnp.int32)}, "the pool is int32"),
        ({"pool": jnp.zeros((4, 2, 4, 48))}, "rows hold 48 numbers"),
        ({"block_tables": jnp.zeros(6, jnp.int32)}, r"block_tables is \(6,\)"),
        ({"context_lens": jnp.zeros(5, jnp.int32)}, r"context_lens is int32\[5\]: needs int32\[6\]"),
        ({"cu_seqlens_q": jnp.zeros(6, jnp.int32)}, r"cu_seqlens_q is int32\[6\]: needs int32\[7\]"),
        ({"num_seqs": jnp.zeros(2, jnp.int32)}, r"num_seqs is int32\[2\]: needs int32\[1\]"),
        ({"context_lens": jnp.zeros(6, jnp.uint32)}, "context_lens is uint32"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0"),
        ({"decode_only": True}, "48 tokens for 6 sequences"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(case(), **changes)


def write(case, backend="xla", **changes):
    new = jnp.ones((48, 2, 16))
    arguments = {"pool": case.pool, "k": new, "v": new, "slot_mapping": case.batch.slot_mapping, **changes}
    return unhooked_write(**arguments, backend=backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": jnp.ones((48, 3, 16)), "v": jnp.ones((48, 3, 16))}, r"k is \(48, 3, 16\): needs \[48, 2, H\]"),
        ({"v": jnp.ones((48, 2, 8))}, r"v is \(48, 2, 8\)"),
        ({"slot_mapping": jnp.zeros(47, jnp.int32)}, r"needs \[47, 2, H\], as slot_mapping"),
        ({"slot_mapping": jnp.zeros(48, jnp.uint32)}, "slot_mapping is uint32"),
        ({"pool": jnp.zeros((4, 2, 4, 64))}, "rows hold 64 numbers"),
    ],
)
def test_new_keys_and_values_that_do_not_fit_the_pool_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        write(case(), **changes)


def test_one_step_writes_then_sees_its_own_tokens():
    """A new sequence of one token sees itself alone: its answer is its value."""
    form = Form(max_seqs=2)
    batch = make_case(form, [1], [1], backend="xla", decode_only=True).batch
    pool = jnp.full((form.num_blocks, 2, 4, 32), jnp.nan)
    k, v = jnp.ones((2, 2, 16)), jnp.arange(64.0).reshape(2, 2, 16)
    pool = paged_attention.write(pool, k, v, batch.slot_mapping, backend="xla")
    q = jnp.ones((2, 4, 16))
    out = paged_attention.attend(q, pool, *batch[1:], scale=0.25, decode_only=True, backend="xla")
    np.testing.assert_allclose(np.asarray(out[0]), np.repeat(np.asarray(v[0]), 2, axis=0))
    assert not np.asarray(out[1]).any()
