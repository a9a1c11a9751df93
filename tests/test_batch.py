import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.config import EngineConfig
from jaxvllm.engine.batch import (
    MAX_BANNED_IDS,
    Bucket,
    banned_ids,
    choose_bucket,
    make_buckets,
    pack_step,
    packed_fields,
    split_step,
    whole_piece,
)
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.step import ScheduledStep
from jaxvllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
NUM_SLOTS = 400
NUM_IDS = 8
VOCAB_SIZE = 1000
OPTIONS = {"num_slots": NUM_SLOTS, "num_ids": NUM_IDS, "vocab_size": VOCAB_SIZE}


def whole(seqs, decode_only):
    return whole_piece(ScheduledStep.of(seqs, "decode" if decode_only else "prefill"))


def sequence(token_ids, *, cached, scheduled, block_table, **params):
    seq = Sequence(token_ids, SamplingParams(seed=params.pop("seed", 0), **params), block_size=BLOCK_SIZE)
    seq.num_cached_tokens, seq.num_scheduled_tokens = cached, scheduled
    seq.block_table = list(block_table)
    return seq


def unpack(buffer, bucket):
    fields, length = packed_fields(bucket)
    assert buffer.dtype == np.int32
    assert buffer.shape == (length,)
    return {
        name: buffer[f.offset : f.offset + int(np.prod(f.shape))].view(f.dtype).reshape(f.shape)
        for name, f in fields.items()
    }


def pack(seqs, bucket, eos=()):
    return unpack(pack_step(whole(seqs, bucket.decode_only), bucket, **OPTIONS, eos=eos), bucket)


@pytest.fixture
def prefill():
    """A chunk over a cached prefix that crosses a block's end, and a whole prompt."""
    seqs = [
        sequence(range(100, 110), cached=4, scheduled=5, block_table=[7, 2, 9]),
        sequence([5, 6, 7], cached=0, scheduled=3, block_table=[30]),
    ]
    return pack(seqs, Bucket(16, 4, 5, False))


def test_prefill_tokens_and_positions_are_those_scheduled(prefill):
    assert prefill["token_ids"].tolist() == [104, 105, 106, 107, 108, 5, 6, 7] + [0] * 8
    assert prefill["positions"].tolist() == [4, 5, 6, 7, 8, 0, 1, 2] + [0] * 8


def test_slots_follow_the_block_table_and_padding_is_one_past_the_last(prefill):
    assert prefill["slot_mapping"].tolist() == [8, 9, 10, 11, 36, 120, 121, 122] + [NUM_SLOTS] * 8


def test_lengths_tables_and_offsets_are_padded_as_designed(prefill):
    assert prefill["context_lens"].tolist() == [9, 3, 0, 0]
    assert prefill["cu_seqlens_q"].tolist() == [0, 5, 8, 8, 8]
    assert prefill["num_seqs"].tolist() == [2]
    assert prefill["block_tables"].tolist() == [[7, 2, 9, 0, 0], [30, 0, 0, 0, 0], [0] * 5, [0] * 5]


def test_padding_rows_sample_greedily(prefill):
    assert prefill["temperature"].tolist() == [1, 1, 0, 0]
    assert prefill["top_p"].tolist() == [1, 1, 1, 1]


def test_decode_takes_the_last_token_of_each_sequence():
    seqs = [
        sequence(range(10, 19), cached=8, scheduled=1, block_table=[3, 4, 5]),
        sequence([50], cached=0, scheduled=1, block_table=[6]),
    ]
    fields = pack(seqs, Bucket(2, 2, 3, True))
    assert fields["token_ids"].tolist() == [18, 50]
    assert fields["positions"].tolist() == [8, 0]
    assert fields["slot_mapping"].tolist() == [20, 24]
    assert fields["context_lens"].tolist() == [9, 1]


def test_sampling_options_survive_the_integer_buffer_to_the_bit():
    seed = 0x0123456789ABCDEF
    seq = sequence(
        [1, 2],
        cached=1,
        scheduled=1,
        block_table=[0],
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        seed=seed,
    )
    fields = pack([seq], Bucket(2, 2, 1, True))
    assert fields["temperature"][0] == np.float32(0.7)
    assert fields["top_p"][0] == np.float32(0.9)
    assert fields["min_p"][0] == np.float32(0.05)
    assert fields["top_k"][0] == 5
    assert fields["seeds"][0].tolist() == [0x01234567, 0x89ABCDEF]


def test_end_ids_are_banned_until_min_tokens_are_there():
    seq = sequence([1, 2], cached=1, scheduled=1, block_table=[0], min_tokens=2, max_tokens=9, stop_token_ids=(40, 7))
    bucket = Bucket(2, 2, 1, True)
    padding = [VOCAB_SIZE] * (MAX_BANNED_IDS - 3)
    assert pack([seq], bucket, eos={9})["banned_token_ids"][0].tolist() == [7, 9, 40, *padding]
    seq.append_token(3)
    seq.append_token(3)
    assert set(pack([seq], bucket, eos={9})["banned_token_ids"].ravel()) == {VOCAB_SIZE}


def test_ignore_eos_bans_only_the_request_s_own_stop_ids():
    assert banned_ids((40, 7), ignore_eos=True, eos={9}) == [7, 40]
    assert banned_ids((), ignore_eos=False, eos={9, 3}) == [3, 9]


@pytest.fixture
def buckets():
    return make_buckets(
        EngineConfig(
            model="folder",
            max_num_batched_tokens=256,
            max_num_seqs=32,
            max_model_len=64,
            kvcache_block_size=BLOCK_SIZE,
            block_buckets=(8, 16),
        )
    )


def test_buckets_are_bounded_and_distinct(buckets):
    decode = {b for b in buckets if b.decode_only}
    prefill = set(buckets) - decode
    assert len(buckets) == len(set(buckets)) == 2 * (6 + 5)
    assert {b.num_seqs for b in decode} == {1, 2, 4, 8, 16, 32}
    assert all(b.num_tokens == b.num_seqs for b in decode)
    assert {b.num_tokens for b in prefill} == {16, 32, 64, 128, 256}


def test_no_bucket_is_larger_than_the_pieces_of_a_prefill():
    config = EngineConfig(model="folder", max_num_batched_tokens=4096)
    assert max(make_buckets(config, 512)).num_tokens == 512
    assert max(make_buckets(config)).num_tokens == 4096
    asked = EngineConfig(model="folder", max_num_batched_tokens=4096, token_buckets=(64, 4096))
    assert max(make_buckets(asked, 512)).num_tokens == 4096


def test_every_step_within_the_limits_has_a_bucket_that_holds_it(buckets):
    for num_seqs in range(1, 33):
        for length in (1, 8, 256 // num_seqs):
            seqs = [sequence([1] * length, cached=0, scheduled=length, block_table=[0]) for _ in range(num_seqs)]
            bucket = choose_bucket(buckets, whole(seqs, decode_only=False))
            assert not bucket.decode_only
            assert bucket.num_tokens >= num_seqs * length
            assert bucket.num_seqs >= num_seqs


def test_a_step_takes_the_smallest_bucket(buckets):
    seqs = [sequence([1] * 30, cached=29, scheduled=1, block_table=range(9))] * 3
    assert choose_bucket(buckets, whole(seqs, decode_only=True)) == Bucket(4, 4, 16, True)
    assert choose_bucket(buckets, whole(seqs[:1], decode_only=False)) == Bucket(16, 2, 16, False)


def test_each_step_gets_a_buffer_of_its_own():
    seqs = [sequence([1, 2], cached=1, scheduled=1, block_table=[0])]
    piece, bucket = whole(seqs, decode_only=True), Bucket(2, 2, 1, True)
    first, second = (pack_step(piece, bucket, **OPTIONS, eos=frozenset()) for _ in range(2))
    assert not np.shares_memory(first, second)


def test_sampled_ids_go_to_their_rows_and_padding_past_the_end(prefill):
    assert prefill["id_rows"].tolist() == [0, 1, NUM_IDS, NUM_IDS]
    assert prefill["pending_rows"].size == 0


def test_a_pending_token_is_taken_from_the_row_of_its_step():
    seqs = [sequence([5, 6], cached=1, scheduled=1, block_table=[3]) for _ in range(3)]
    seqs[1].append_pending(row=7)
    seqs[1].num_cached_tokens += 1
    fields = pack(seqs, Bucket(4, 4, 3, True))
    assert fields["pending_rows"].tolist() == [NUM_IDS, 7, NUM_IDS, NUM_IDS]
    assert fields["positions"].tolist() == [1, 2, 1, 0]
    assert fields["token_ids"].tolist() == [6, 0, 6, 0]


def runs(pieces):
    """Each piece as what it is and, per sequence, its row of ids, first position and number of tokens."""
    columns = [(piece.decode_only, zip(piece.id_rows, piece.starts, piece.num_new, strict=True)) for piece in pieces]
    return [(decode_only, [tuple(map(int, row)) for row in rows]) for decode_only, rows in columns]


PIECES_OF_16 = [Bucket(2, 2, 9, True), Bucket(8, 2, 9, False), Bucket(16, 4, 9, False)]


def prompts(*lengths, cached=0):
    seqs = [sequence([1] * 99, cached=cached, scheduled=n, block_table=[0]) for n in lengths]
    return ScheduledStep.of(seqs, "prefill")


def test_a_step_that_fits_stays_whole():
    assert runs(split_step(prompts(9, 1, 6), PIECES_OF_16)) == [(False, [(0, 0, 9), (1, 0, 1), (2, 0, 6)])]


def test_a_long_step_is_cut_within_its_sequences():
    assert runs(split_step(prompts(10, 30, 3, cached=4), PIECES_OF_16)) == [
        (False, [(0, 4, 10), (1, 4, 6)]),
        (False, [(1, 10, 16)]),
        (False, [(1, 26, 8), (2, 4, 3)]),
    ]


def test_a_step_of_many_sequences_is_cut_between_them():
    assert runs(split_step(prompts(2, 2, 2, 2, 2), PIECES_OF_16)) == [
        (False, [(i, 0, 2) for i in range(4)]),
        (False, [(4, 0, 2)]),
    ]


def test_single_new_tokens_run_as_a_decode_where_they_are_most():
    assert runs(split_step(prompts(1, 20, 1, 1), PIECES_OF_16)) == [
        (True, [(0, 0, 1), (2, 0, 1), (3, 0, 1)]),
        (False, [(1, 0, 16)]),
        (False, [(1, 16, 4)]),
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_pieces_run_every_token_once_and_in_order(lengths):
    pieces = split_step(prompts(*lengths), PIECES_OF_16)
    position = [0] * len(lengths)
    for piece in pieces:
        assert piece.decode_only or (piece.num_new.sum() <= 16 and len(piece.seqs) <= 4)
        for row, start, num_new in zip(piece.id_rows, piece.starts, piece.num_new, strict=True):
            assert start == position[row]
            assert num_new == 1 if piece.decode_only else num_new > 0
            position[row] += num_new
    assert position == lengths
