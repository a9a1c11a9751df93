"""The oracle itself, against loops over single tokens in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Form, make_case

from jaxvllm.kernels import kv_cache, reference


def attend_token_by_token(case):
    """Computes each token's answer [T, N, H] from its own keys, one head at a time, in float64."""
    form, batch = case.form, case.batch
    q, pool = np.asarray(case.q, np.float64), np.asarray(case.pool, np.float64)
    Hp, cu_seqlens = pool.shape[3] // 2, np.asarray(batch.cu_seqlens_q)
    out = np.zeros(q.shape)
    for s in range(int(batch.num_seqs[0])):
        num_new = cu_seqlens[s + 1] - cu_seqlens[s]
        for i in range(num_new):
            position = int(batch.context_lens[s]) - num_new + i
            first = 0 if form.sliding_window is None else max(0, position - form.sliding_window + 1)
            slots = [
                (int(batch.block_tables[s, p // form.block_size]), p % form.block_size)
                for p in range(first, position + 1)
            ]
            for n in range(form.num_heads):
                head = n // (form.num_heads // form.num_kv_heads)
                rows = np.stack([pool[block, head, offset] for block, offset in slots])
                scores = rows[:, : form.head_dim] @ q[cu_seqlens[s] + i, n] * form.head_dim**-0.5
                if form.logits_soft_cap is not None:
                    scores = form.logits_soft_cap * np.tanh(scores / form.logits_soft_cap)
                weights = np.exp(scores - scores.max())
                out[cu_seqlens[s] + i, n] = weights / weights.sum() @ rows[:, Hp : Hp + form.head_dim]
    return out


@pytest.mark.parametrize(
    "form",
    [
        Form(),
        Form(num_heads=3, num_kv_heads=1, sliding_window=6, logits_soft_cap=1.5),
        Form(num_heads=2, num_kv_heads=2, block_size=2, max_blocks=24, sliding_window=1),
    ],
    ids=["plain", "windowed_and_capped", "window_of_one"],
)
@pytest.mark.parametrize("backend", ["xla", "tpu"])
def test_the_oracle_agrees_with_loops_over_tokens(form, backend):
    # a prompt, a chunk over a prefix, a decode, rows without new tokens, a context that ends with its block
    case = make_case(form, [9, 23, 17, 0, 6, 40], [9, 7, 1, 0, 0, 24], backend=backend)
    got = np.asarray(reference.attend(*case.arguments, **form.options))
    np.testing.assert_allclose(got[:41], attend_token_by_token(case)[:41], atol=2e-6)
    assert not got[41:].any()


def test_the_oracle_writes_as_the_cache_does():
    case = make_case(Form(), [9, 23], [9, 7], backend="xla")
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(48, 2, 16)), jnp.float32) for _ in range(2))
    want, got = (np.asarray(op(case.pool, k, v, case.batch.slot_mapping)) for op in (reference.write, kv_cache.write))
    np.testing.assert_array_equal(got, want)
    block, offset = divmod(int(case.batch.slot_mapping[3]), 4)
    np.testing.assert_array_equal(want[block, :, offset], np.concatenate([k[3], v[3]], axis=-1))
