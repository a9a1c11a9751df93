"""Scheduled sequences to the padded integer arrays of one step. NumPy only, pure functions.

Everything a step needs travels in one int32 buffer, so that there is one transfer to the device per step. Both sides
find a field by `packed_fields(bucket)`: the host fills views into the buffer, the compiled step slices it (`unpack`
in `model_runner.py`). A buffer is new for every step: on the CPU jax may read it in place while the step runs.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxvllm.config import EngineConfig
from jaxvllm.engine.sequence import Sequence

MAX_BANNED_IDS = 16  # end ids and stop ids that a request with min_tokens may have
_TOKENS_PER_PREFILL_SEQ = 16  # a prefill bucket of T tokens holds T / 16 sequences: its head runs on few padded rows


class Bucket(NamedTuple):
    """The static shape of a step: T tokens, S sequences, M blocks per sequence. One compiled program each."""

    num_tokens: int
    num_seqs: int
    num_blocks: int
    decode_only: bool  # every sequence has one new token and T == S


class Field(NamedTuple):
    """Where a field lies in the packed buffer, in int32 words; `dtype` has 4 bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: type[np.generic]


def make_buckets(config: EngineConfig) -> list[Bucket]:
    """Every step shape an engine can need: one per decode batch size, one per prefill size, times M."""
    seq_buckets = config.resolved_seq_buckets()
    token_buckets = config.resolved_token_buckets()
    most_seqs = seq_buckets[-1]
    buckets = []
    for num_blocks in config.resolved_block_buckets():
        buckets += [Bucket(s, s, num_blocks, True) for s in seq_buckets]
        for num_tokens in token_buckets:
            wanted = max(1, num_tokens // _TOKENS_PER_PREFILL_SEQ)
            num_seqs = most_seqs if num_tokens == token_buckets[-1] else _round_up(wanted, seq_buckets)
            buckets.append(Bucket(num_tokens, num_seqs, num_blocks, False))
    return buckets


def choose_bucket(buckets: Iterable[Bucket], seqs: list[Sequence], is_prefill: bool) -> Bucket:
    """Returns the smallest bucket that holds the step."""
    num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
    num_blocks = max(len(seq.block_table) for seq in seqs)
    fitting = (
        bucket
        for bucket in buckets
        if bucket.decode_only != is_prefill
        and bucket.num_tokens >= num_tokens
        and bucket.num_seqs >= len(seqs)
        and bucket.num_blocks >= num_blocks
    )
    bucket = min(fitting, default=None)
    assert bucket is not None, f"no bucket holds {num_tokens} tokens of {len(seqs)} sequences, {num_blocks} blocks"
    return bucket


def packed_fields(bucket: Bucket) -> tuple[dict[str, Field], int]:
    """Returns the fields of a step's buffer and its length in int32 words."""
    T, S, M = bucket.num_tokens, bucket.num_seqs, bucket.num_blocks
    shapes: list[tuple[str, tuple[int, ...], type[np.generic]]] = [
        ("token_ids", (T,), np.int32),
        ("positions", (T,), np.int32),
        ("slot_mapping", (T,), np.int32),
        ("block_tables", (S, M), np.int32),
        ("context_lens", (S,), np.int32),
        ("cu_seqlens_q", (S + 1,), np.int32),
        ("num_seqs", (1,), np.int32),
        ("temperature", (S,), np.float32),
        ("top_k", (S,), np.int32),
        ("top_p", (S,), np.float32),
        ("min_p", (S,), np.float32),
        ("seeds", (S, 2), np.uint32),
        ("banned_token_ids", (S, MAX_BANNED_IDS), np.int32),
    ]
    fields, offset = {}, 0
    for name, shape, dtype in shapes:
        fields[name] = Field(offset, shape, dtype)
        offset += int(np.prod(shape))
    return fields, offset


def pack_step(
    seqs: list[Sequence], bucket: Bucket, *, num_slots: int, vocab_size: int, eos: Collection[int]
) -> Int32[np.ndarray, " words"]:
    """Builds the packed buffer of one step.

    `num_slots` is block_size times the blocks of the pool: the padding slot, one past the last. `vocab_size` pads
    the banned ids, out of the logits' range.
    """
    fields, length = packed_fields(bucket)
    buffer = np.zeros(length, np.int32)
    views = {name: _view(buffer, field) for name, field in fields.items()}
    _fill_tokens(views, seqs, num_slots)
    _fill_sampling(views, seqs, vocab_size, eos)
    return buffer


def _fill_tokens(views: dict[str, np.ndarray], seqs: list[Sequence], num_slots: int):
    n = len(seqs)
    block_size = seqs[0].block_size
    starts = np.fromiter((seq.num_cached_tokens for seq in seqs), np.int32, n)
    lens = np.fromiter((seq.num_scheduled_tokens for seq in seqs), np.int32, n)
    tables = views["block_tables"]
    for row, seq in enumerate(seqs):
        tables[row, : len(seq.block_table)] = seq.block_table

    views["context_lens"][:n] = starts + lens
    cu_seqlens_q = views["cu_seqlens_q"]
    np.cumsum(lens, out=cu_seqlens_q[1 : n + 1])
    cu_seqlens_q[n + 1 :] = cu_seqlens_q[n]
    views["num_seqs"][0] = n

    num_tokens = int(cu_seqlens_q[n])
    views["token_ids"][:num_tokens] = np.fromiter(_new_tokens(seqs), np.int32, num_tokens)
    rows = np.repeat(np.arange(n, dtype=np.int32), lens)
    positions = np.arange(num_tokens, dtype=np.int32) + (starts - cu_seqlens_q[:n])[rows]
    views["positions"][:num_tokens] = positions
    slots = views["slot_mapping"]
    slots[:num_tokens] = tables[rows, positions // block_size] * block_size + positions % block_size
    slots[num_tokens:] = num_slots  # never -1: JAX wraps it to the last slot even where writes out of range drop


def _new_tokens(seqs: list[Sequence]) -> Iterator[int]:
    """The step's token ids; a decoding sequence's is its last, without a slice."""
    return chain.from_iterable(
        seq.token_ids[seq.num_cached_tokens : seq.num_cached_tokens + seq.num_scheduled_tokens]
        if seq.num_scheduled_tokens > 1
        else (seq.token_ids[seq.num_cached_tokens],)
        for seq in seqs
    )


def _fill_sampling(views: dict[str, np.ndarray], seqs: list[Sequence], vocab_size: int, eos: Collection[int]):
    n = len(seqs)
    params = [seq.sampling_params for seq in seqs]
    views["temperature"][:n] = [p.temperature for p in params]
    views["top_k"][:n] = [p.top_k for p in params]
    views["top_p"][:] = 1
    views["top_p"][:n] = [p.top_p for p in params]
    views["min_p"][:n] = [p.min_p for p in params]
    words = np.fromiter((seq.seed for seq in seqs), np.uint64, n)
    views["seeds"][:n, 0] = words >> np.uint64(32)
    views["seeds"][:n, 1] = words & np.uint64(0xFFFFFFFF)
    banned = views["banned_token_ids"]
    banned[:] = vocab_size
    for row, seq in enumerate(seqs):
        if seq.num_completion_tokens < seq.min_tokens:
            ids = banned_ids(seq.sampling_params.stop_token_ids, seq.ignore_eos, eos)
            banned[row, : len(ids)] = ids


def banned_ids(stop_token_ids: Iterable[int], ignore_eos: bool, eos: Collection[int]) -> list[int]:
    """The ids that may not be sampled before `min_tokens`."""
    return sorted(set(stop_token_ids) | (set() if ignore_eos else set(eos)))


def _view(buffer: Int32[np.ndarray, " words"], field: Field) -> np.ndarray:
    size = int(np.prod(field.shape))
    return buffer[field.offset : field.offset + size].reshape(field.shape).view(field.dtype)


def _round_up(value: int, buckets: Iterable[int]) -> int:
    """The smallest bucket of at least `value`, or the largest there is."""
    last = value
    for last in buckets:
        if last >= value:
            break
    return last
