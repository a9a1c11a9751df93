"""The CPU's attention: what it costs in steps, memory and tracing. What it answers: test_conformance.py."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FORMS, Form, check, make_case

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels import xla as paged_attention_xla

attend_untraced = inspect.unwrap(paged_attention_xla.attend)


@pytest.fixture
def steps(monkeypatch):
    """Counts the chunks that the loops go through while a program runs, and how often their body is traced."""
    sound, counts = paged_attention_xla._attend_chunk, {"run": 0, "traced": 0}

    def count():
        counts["run"] += 1

    def counted(*arguments):
        counts["traced"] += 1
        jax.debug.callback(count)
        return sound(*arguments)

    monkeypatch.setattr(paged_attention_xla, "_attend_chunk", counted)
    return counts


def run(case, steps):
    """Returns the steps of one batch; asserts that its answer is right."""
    steps["run"] = 0
    jax.block_until_ready(check("xla", case, attend_untraced))
    jax.effects_barrier()
    return steps["run"]


DECODE = Form(block_size=16, max_seqs=8, max_blocks=64)
decode = functools.partial(make_case, backend="xla", decode_only=True)


def two_rows_a_step(monkeypatch):
    """Makes a step of a decode hold two sequences and 128 tokens of each."""
    monkeypatch.setattr(paged_attention_xla, "_DECODE_ROWS", 2)
    monkeypatch.setattr(paged_attention_xla, "_DECODE_TOKENS", 2 * 128)


@pytest.mark.parametrize(
    ("context_lens", "num_steps"),
    [
        ([1], 1),
        ([128] * 2, 1),
        ([128] * 8, 4),
        ([129, 128, 128, 128, 128, 128, 128, 128], 5),  # four tiles, and one more chunk of one
        ([3, 1000, 3, 1000, 3, 3], 3 + 7),  # the two long ones share their tiles, wherever they stand
        ([1024, 1, 1, 1, 1, 1, 1, 1], 4 + 7),
        ([], 0),
    ],
)
def test_a_decode_costs_each_sequence_its_own_context(monkeypatch, steps, context_lens, num_steps):
    two_rows_a_step(monkeypatch)
    assert run(decode(DECODE, context_lens, [1] * len(context_lens)), steps) == num_steps


def test_a_decode_starts_where_the_window_does(monkeypatch, steps):
    two_rows_a_step(monkeypatch)
    form = Form(block_size=16, max_seqs=8, max_blocks=64, sliding_window=100)
    assert run(decode(form, [1000, 1024], [1, 1]), steps) == 1
    assert run(decode(form, [50, 1024], [1, 1]), steps) == 1


@pytest.mark.parametrize("name", FORMS)
def test_a_decode_in_many_tiles_is_right(monkeypatch, name):
    """The conformance suite's batches fit one tile; here a tile has one sequence, or the last one is not full."""
    form = FORMS[name]
    longest = form.max_blocks * form.block_size
    lens = [longest, 1, longest // 2 + 1, form.block_size, longest - 1][: form.max_seqs]
    for rows in (1, 2):
        monkeypatch.setattr(paged_attention_xla, "_DECODE_ROWS", rows)
        monkeypatch.setattr(paged_attention_xla, "_DECODE_CHUNK_TOKENS", (1, 1))
        check("xla", decode(form, lens, [1] * len(lens)), attend_untraced)


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "block_size", "tile"),
    [
        (1, 3, 16, (1, 16)),  # few sequences: chunks of 256 tokens
        (8, 8, 16, (8, 8)),
        (32, 3, 16, (16, 6)),  # many: 16 at a time, 96 tokens of each
        (17, 3, 16, (9, 7)),  # tiles of even size
        (32, 3, 256, (16, 1)),  # never less than a block
        (32, 256, 16, (1, 8)),  # 16 MiB of 256 KV heads
    ],
)
def test_a_decode_tile_takes_rows_first_then_longer_chunks_within_its_bytes(num_seqs, num_kv_heads, block_size, tile):
    pool = jnp.zeros((1, num_kv_heads, block_size, 2 * 64))
    assert paged_attention_xla._decode_tile(num_seqs, pool) == tile


PROMPTS = Form(block_size=16, max_seqs=24, max_tokens=512, max_blocks=64)  # tiles of 64 rows, chunks of 128 keys
prompts = functools.partial(make_case, PROMPTS, backend="xla")


@pytest.mark.parametrize(
    ("context_lens", "num_new", "num_steps"),
    [
        ([64], [64], 1),
        ([512], [512], 1 + 1 + 2 + 2 + 3 + 3 + 4 + 4),  # no key past a tile's last row
        ([1024], [64], 8),
        ([20] * 24, [20] * 24, 8),  # a prompt's two blocks, four or five prompts a tile: 128 or 160 keys
        ([0] * 24, [0] * 24, 0),
        ([900] * 4, [0] * 4, 0),
        ([], [], 0),
    ],
)
def test_a_prefill_costs_the_keys_its_rows_see(steps, context_lens, num_new, num_steps):
    taken = run(prompts(context_lens, num_new), steps)
    assert num_steps <= taken <= (2 * num_steps if len(num_new) > 1 else num_steps)


def test_a_prefill_starts_where_the_window_does(steps):
    form = Form(block_size=16, max_seqs=2, max_tokens=64, max_blocks=64, sliding_window=50)
    assert run(make_case(form, [1024], [64], backend="xla"), steps) == 1


@pytest.mark.parametrize("decode_only", [False, True], ids=["ragged", "decode"])
def test_the_layers_of_a_model_trace_it_once(steps, decode_only):
    form = Form(head_dim=20)  # no other test has traced it
    case = make_case(form, [5], [1], backend="xla", decode_only=decode_only)

    def forward(q, pools, metadata):
        for pool in pools:
            q = paged_attention.attend(q, pool, *metadata, **form.options, decode_only=decode_only, backend="xla")
        return q

    jax.jit(forward).lower(case.q, [case.pool] * 5, case.batch[1:])
    assert steps["traced"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decode_only", [False, True], ids=["ragged", "decode"])
def test_a_step_updates_donated_pools_in_place(dtype, decode_only):
    """Alias is the pools, and the temporaries of many layers are those of one: no copy, no 32 MiB buffer."""
    num_layers, K, H, P = 4, 8, 128, 16
    T, S, M = (256, 256, 256) if decode_only else (2048, 64, 256)

    def step(pools, q, k, v, batch):
        for i, pool in enumerate(pools):
            pools[i] = paged_attention.write(pool, k, v, batch.slot_mapping, backend="xla")
            q = paged_attention.attend(q, pools[i], *batch[1:], scale=0.1, decode_only=decode_only, backend="xla")
        return q, pools

    def integers(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pool = jax.ShapeDtypeStruct((8192, K, P, 2 * H), dtype)
    q, k = jax.ShapeDtypeStruct((T, 16, H), dtype), jax.ShapeDtypeStruct((T, K, H), dtype)
    batch = paged_attention.AttentionBatch(integers(T), integers(S, M), integers(S), integers(S + 1), integers(1))
    compiled = jax.jit(step, donate_argnums=0).lower([pool] * num_layers, q, k, k, batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == num_layers * pool.size * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 32 << 20


@pytest.mark.parametrize("decode_only", [False, True], ids=["ragged", "decode"])
def test_it_runs_under_shard_map(decode_only):
    """One KV head and its query heads per chip; the loops' carries must vary over the mesh as the heads do."""
    case = make_case(FORMS["small"], [13, 30], [1, 1], backend="xla", decode_only=decode_only)
    heads, whole = jax.P(None, "tensor"), jax.P()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    attend = functools.partial(attend_untraced, **case.form.options, decode_only=decode_only)
    sharded = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, *[whole] * 4), out_specs=heads))
    check("xla", case, lambda *arguments, **_: sharded(*arguments))


def test_large_scores_neither_overflow_nor_vanish():
    case = decode(DECODE, [40, 300], [1, 1])
    out = attend_untraced(case.q * 1e4, case.pool, *case.batch[1:], scale=1.0, decode_only=True)
    assert np.isfinite(np.asarray(out)).all()
    assert np.abs(np.asarray(out[:2])).max() > 0.1
