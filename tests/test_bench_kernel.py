"""What `jaxvllm bench kernel` counts, on batches small enough to count by hand."""

import pytest

from tools.tpu import kernel
from tools.tpu.schedule import Case, Region, parse

CASE = Case(
    chip="v5e", kernel="decode", num_heads=32, num_kv_heads=8, head_dim=128, block_size=64, max_context=1024,
    num_seqs=3, num_tokens=3,
)  # fmt: skip
ROW_BYTES = 8 * 2 * 128 * 2
IO_BYTES = 2 * 32 * 128 * 2


def test_a_decode_moves_its_live_tiles_and_no_more():
    trips = kernel.count_decode([1, 64, 330], CASE)
    assert trips.kv_bytes == (16 + 64 + 336) * ROW_BYTES
    assert trips.io_bytes == 3 * IO_BYTES
    assert trips.floor_bytes == (1 + 64 + 330) * ROW_BYTES + 3 * IO_BYTES
    assert trips.write_bytes == 3 * (2 + 16) * ROW_BYTES  # a row in float32, a tile back
    assert trips.separate_write_bytes == trips.write_bytes + 3 * 16 * ROW_BYTES
    assert trips.write_floor_bytes == 3 * 2 * ROW_BYTES
    assert (trips.steps, trips.whole_copies, trips.part_copies) == (3, 6, 2)
    assert (trips.inside, trips.boundary) == (1, 3)


def test_sequences_that_stand_together_take_their_steps_together():
    """v6e takes two at a time, the longest first: [330, 64], then [1]."""
    trips = kernel.count_decode([1, 64, 330], Case(**{**vars(CASE), "chip": "v6e"}))
    assert (trips.steps, trips.whole_copies, trips.part_copies) == (2, 6, 2)
    assert (trips.inside, trips.boundary) == (0, 3)


def test_a_chunk_is_a_step():
    trips = kernel.count_decode([2500], Case(**{**vars(CASE), "max_context": 4096, "num_seqs": 1, "num_tokens": 1}))
    assert (trips.steps, trips.inside, trips.boundary) == (3, 9, 1)


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("model", kernel.HEADS)
def test_the_nano_workload_stays_within_three_percent_of_the_floor(model, block_size):
    lens = kernel.context_lens("nano")
    N, K, H = kernel.HEADS[model]
    case = Case(
        chip="v6e", kernel="decode", num_heads=N, num_kv_heads=K, head_dim=H, block_size=block_size,
        max_context=1024, num_seqs=len(lens), num_tokens=len(lens),
    )  # fmt: skip
    trips = kernel.count_decode(lens, case)
    assert (trips.kv_bytes + trips.io_bytes) / trips.floor_bytes < 1.03


def test_the_schedule_is_split_where_loops_begin():
    bundles = "\n".join(
        [
            "  0x0   :  { nop }",
            "  0x1 LB: > { sld }",
            "  0x2   : > { sadd }",
            "  0x3 LB: >> { vmatmul }",
            "  0x4 PF: > { nop }",
        ]
    )
    utilization = "== CAPACITY:\nMXU\n4\n== UTILIZATION:\n0 0\n0 1\n0 1\n3 0\n0 0\n"
    assert list(parse(bundles, utilization)) == [
        Region(1, True, 2, 0),
        Region(2, True, 1, 3),
        Region(1, False, 1, 0),
    ]
