"""A scheduled step to the padded integer arrays of its programs. NumPy only, pure functions.

Everything a step needs travels in one int32 buffer, so that there is one transfer to the device per step. Both sides
find a field by `packed_fields(bucket)`: the host fills views into the buffer, the compiled step slices it (`unpack`
in `model_runner.py`). A buffer is new for every step: on the CPU jax may read it in place while the step runs.
"""

import math
from collections.abc import Collection, Iterable
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxvllm.config import EngineConfig
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.step import ScheduledStep

MAX_BANNED_IDS = 16  # end ids and stop ids that a request with min_tokens may have
_TOKENS_PER_PREFILL_SEQ = 8  # a prefill bucket of T tokens holds T / 8 sequences: its head runs on few padded rows


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


class Piece(NamedTuple):
    """What one program runs of a step: of each of its sequences, `num_new` tokens from position `starts` on."""

    seqs: list[Sequence]
    starts: Int32[np.ndarray, " n"]
    num_new: Int32[np.ndarray, " n"]
    id_rows: Int32[np.ndarray, " n"]  # where each sampled id goes, among the ids of the whole step
    decode_only: bool  # one token per sequence, run by a decode's program


# What never changes of a request, as `pack_step` writes it: packed once, the first time that the request runs.
_SAMPLING = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seeds", np.uint32, (2,)),  # the high word, then the low one
    ]
)


def make_buckets(config: EngineConfig, prefill_limit: int | None = None) -> list[Bucket]:
    """Every step shape an engine can need: one per decode batch size, one per prefill size, times M.

    A prefill of more than `prefill_limit` tokens runs in pieces: see `split_step`. None is no limit.
    """
    seq_buckets = config.resolved_seq_buckets()
    token_buckets = config.resolved_token_buckets(prefill_limit)
    most_seqs = seq_buckets[-1]
    runs_whole = token_buckets[-1] >= config.max_num_batched_tokens
    buckets = []
    for num_blocks in config.resolved_block_buckets():
        buckets += [Bucket(s, s, num_blocks, True) for s in seq_buckets]
        for num_tokens in token_buckets:
            wanted = max(1, num_tokens // _TOKENS_PER_PREFILL_SEQ)
            is_last = num_tokens == token_buckets[-1] and runs_whole
            num_seqs = most_seqs if is_last else _round_up(wanted, seq_buckets)
            buckets.append(Bucket(num_tokens, num_seqs, num_blocks, False))
    return buckets


def whole_piece(step: ScheduledStep) -> Piece:
    """The step as one piece."""
    n = len(step.seqs)
    starts, num_new = np.fromiter(step.starts, np.int32, n), np.fromiter(step.num_new, np.int32, n)
    return Piece(step.seqs, starts, num_new, np.arange(n, dtype=np.int32), not step.is_prefill)


def split_step(step: ScheduledStep, buckets: Iterable[Bucket]) -> list[Piece]:
    """Cuts a step into pieces that buckets hold, to be run in order; a decode is one piece.

    A sequence of a prefill may be cut: its next piece attends over the cache, as a chunk of a long prompt does, and
    the id that counts is that of its last piece. Where most sequences have one new token (the rest of a cached prompt),
    those run as a decode does, without a prefill's padding.
    """
    whole = whole_piece(step)
    if not step.is_prefill:
        return [whole]
    is_single = whole.num_new == 1
    if 2 * np.count_nonzero(is_single) <= len(whole.seqs):
        return _split_prefill(whole, buckets)
    singles = _take(whole, np.flatnonzero(is_single))._replace(decode_only=True)
    rest = np.flatnonzero(~is_single)
    return [singles, *(_split_prefill(_take(whole, rest), buckets) if len(rest) else [])]


def _split_prefill(whole: Piece, buckets: Iterable[Bucket]) -> list[Piece]:
    """Cuts at the tokens and the sequences that the largest prefill bucket holds."""
    largest = max(bucket for bucket in buckets if not bucket.decode_only)
    ends = np.cumsum(whole.num_new)
    begins = ends - whole.num_new
    if ends[-1] <= largest.num_tokens and len(whole.seqs) <= largest.num_seqs:
        return [whole]
    pieces = []
    begin, first = 0, 0  # the next token, among all of the step, and its sequence
    while begin < ends[-1]:
        end = min(begin + largest.num_tokens, int(ends[-1]))
        last = min(int(np.searchsorted(ends, end)), first + largest.num_seqs - 1)
        end = min(end, int(ends[last]))
        chosen = np.arange(first, last + 1)
        before = np.maximum(begin - begins[chosen], 0)  # tokens of the sequence in earlier pieces
        until = np.minimum(end, ends[chosen]) - begins[chosen]
        piece = _take(whole, chosen)
        starts, num_new = piece.starts + before, until - before
        pieces.append(piece._replace(starts=starts.astype(np.int32), num_new=num_new.astype(np.int32)))
        begin, first = end, last + (end == ends[last])
    return pieces


def _take(piece: Piece, chosen: np.ndarray) -> Piece:
    """The same of some of its sequences."""
    seqs = [piece.seqs[i] for i in chosen.tolist()]
    return Piece(seqs, piece.starts[chosen], piece.num_new[chosen], piece.id_rows[chosen], piece.decode_only)


def choose_bucket(buckets: Iterable[Bucket], piece: Piece) -> Bucket:
    """Returns the bucket that runs the piece with the least padding: fewest tokens, then sequences, then blocks."""
    num_tokens = int(piece.num_new.sum())
    num_blocks = max([len(seq.block_table) for seq in piece.seqs])
    fitting = (
        bucket
        for bucket in buckets
        if bucket.decode_only == piece.decode_only
        and bucket.num_tokens >= num_tokens
        and bucket.num_seqs >= len(piece.seqs)
        and bucket.num_blocks >= num_blocks
    )
    bucket = min(fitting, key=_padding, default=None)
    assert bucket is not None, f"no bucket: {num_tokens} tokens of {len(piece.seqs)} sequences, {num_blocks} blocks"
    return bucket


def _padding(bucket: Bucket) -> tuple[int, int, int]:
    """What a program costs, most important first: tokens meet every weight, blocks only the attention."""
    return bucket.num_tokens, bucket.num_seqs, bucket.num_blocks


@cache  # as many as there are buckets
def packed_fields(bucket: Bucket) -> tuple[dict[str, Field], int]:
    """Returns the fields of a step's buffer and its length in int32 words; not to be changed."""
    T, S, M = bucket.num_tokens, bucket.num_seqs, bucket.num_blocks
    shapes: list[tuple[str, tuple[int, ...], type[np.generic]]] = [
        ("token_ids", (T,), np.int32),
        ("positions", (T,), np.int32),
        ("slot_mapping", (T,), np.int32),
        ("block_tables", (S, M), np.int32),
        ("context_lens", (S,), np.int32),
        ("cu_seqlens_q", (S + 1,), np.int32),
        ("num_seqs", (1,), np.int32),
        ("id_rows", (S,), np.int32),  # where the sampled ids go, in the step's array of ids; padding: past its end
        ("pending_rows", (S if bucket.decode_only else 0,), np.int32),  # of the tokens without an id yet
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
        offset += math.prod(shape)
    return fields, offset


def pack_step(
    piece: Piece, bucket: Bucket, *, num_slots: int, num_ids: int, vocab_size: int, eos: Collection[int]
) -> Int32[np.ndarray, " words"]:
    """Builds the packed buffer of one program.

    `num_slots` is block_size times the blocks of the pool: the padding slot, one past the last. `num_ids` is the
    length of a step's array of ids, and pads its rows; `vocab_size` pads the banned ids.
    """
    fields, length = packed_fields(bucket)
    buffer = np.zeros(length, np.int32)
    views = {name: _view(buffer, field) for name, field in fields.items()}
    _fill_tokens(views, piece, num_slots)
    _fill_ids(views, piece, num_ids)
    _fill_sampling(views, piece.seqs, vocab_size, eos)
    return buffer


def _fill_tokens(views: dict[str, np.ndarray], piece: Piece, num_slots: int):
    seqs, starts, num_new = piece.seqs, piece.starts, piece.num_new
    n = len(seqs)
    block_size = seqs[0].block_size
    tables = views["block_tables"]
    _fill_tables(tables, [seq.block_table for seq in seqs])

    views["context_lens"][:n] = starts + num_new
    cu_seqlens_q = views["cu_seqlens_q"]
    np.cumsum(num_new, out=cu_seqlens_q[1 : n + 1])
    cu_seqlens_q[n + 1 :] = cu_seqlens_q[n]
    views["num_seqs"][0] = n

    num_tokens = int(cu_seqlens_q[n])
    if num_tokens == n:
        seq_of = np.arange(n)
        positions = starts
        token_ids = [
            0 if seq.num_pending_tokens else seq.token_ids[i] for seq, i in zip(seqs, starts.tolist(), strict=True)
        ]
    else:
        seq_of = np.repeat(np.arange(n, dtype=np.int32), num_new)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - cu_seqlens_q[:n])[seq_of]
        rows = zip(seqs, starts.tolist(), num_new.tolist(), strict=True)
        token_ids = chain.from_iterable(seq.token_ids[start : start + count] for seq, start, count in rows)
    views["token_ids"][:num_tokens] = np.fromiter(token_ids, np.int32, num_tokens)
    views["positions"][:num_tokens] = positions
    slots = views["slot_mapping"]
    slots[:num_tokens] = tables[seq_of, positions // block_size] * block_size + positions % block_size
    slots[num_tokens:] = num_slots  # never -1: JAX wraps it to the last slot even where writes out of range drop


def _fill_tables(tables: Int32[np.ndarray, "S M"], block_tables: list[list[int]]):
    """Writes lists of unequal length into the rows of an array of zeros, in one pass over their elements."""
    lens = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    flat = np.fromiter(chain.from_iterable(block_tables), np.int32, int(lens.sum()))
    width = int(lens.max())
    used = tables[: len(block_tables), :width]
    used[np.arange(width) < lens[:, None]] = flat


def _fill_ids(views: dict[str, np.ndarray], piece: Piece, num_ids: int):
    n = len(piece.seqs)
    views["id_rows"][:n] = piece.id_rows
    views["id_rows"][n:] = num_ids
    if piece.decode_only:
        sources = [seq.pending_row if seq.num_pending_tokens else num_ids for seq in piece.seqs]
        views["pending_rows"][:n] = sources
        views["pending_rows"][n:] = num_ids


def _fill_sampling(views: dict[str, np.ndarray], seqs: list[Sequence], vocab_size: int, eos: Collection[int]):
    n = len(seqs)
    packed = b"".join([seq.packed_sampling or _pack_sampling(seq) for seq in seqs])
    requests = np.frombuffer(packed, _SAMPLING)
    views["top_p"][n:] = 1
    for name in requests.dtype.names or ():
        views[name][:n] = requests[name]
    banned = views["banned_token_ids"]
    banned[:] = vocab_size
    for row, seq in enumerate(seqs):
        if seq.min_tokens and seq.num_tokens - seq.num_prompt_tokens < seq.min_tokens:
            ids = banned_ids(seq.sampling_params.stop_token_ids, seq.ignore_eos, eos)
            banned[row, : len(ids)] = ids


def _pack_sampling(seq: Sequence) -> bytes:
    """Fills `Sequence.packed_sampling`.

    It is kept because packing 256 requests takes 0.32 ms (one EPYC core), the rest of `pack_step` 0.21 ms.
    """
    p = seq.sampling_params
    seeds = (seq.seed >> 32, seq.seed & 0xFFFFFFFF)
    seq.packed_sampling = np.array((p.temperature, p.top_k, p.top_p, p.min_p, seeds), _SAMPLING).tobytes()
    return seq.packed_sampling


def banned_ids(stop_token_ids: Iterable[int], ignore_eos: bool, eos: Collection[int]) -> list[int]:
    """The ids that may not be sampled before `min_tokens`."""
    return sorted(set(stop_token_ids) | (set() if ignore_eos else set(eos)))


def _view(buffer: Int32[np.ndarray, " words"], field: Field) -> np.ndarray:
    size = math.prod(field.shape)
    return buffer[field.offset : field.offset + size].reshape(field.shape).view(field.dtype)


def _round_up(value: int, buckets: Iterable[int]) -> int:
    """The smallest bucket of at least `value`, or the largest there is."""
    last = value
    for last in buckets:
        if last >= value:
            break
    return last
