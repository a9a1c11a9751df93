"""What the GPU kernels move and multiply, by count."""

from dataclasses import replace

import pytest

from tools.gpu import count as gpu_count
from tools.gpu.workloads import Workload

ONE = Workload(context_lens=(128,), num_heads=8, num_kv_heads=1, head_dim=64, block_size=64)


def test_whole_tiles_and_eight_heads_cost_nothing_beside_the_parts():
    counts = gpu_count.count_decode(ONE)
    # two tiles, one worker each: two parts of [64 + 1, 8] float32, written and read; q once more than the floor has it
    parts, extra_q = 2 * 2 * 65 * 8 * 4, 8 * 64 * 2
    assert counts["parts"] == 2
    assert counts["parts_over_floor"] == pytest.approx(parts / ONE.num_bytes)
    assert counts["copied_over_floor"] == pytest.approx(1 + (parts + extra_q) / ONE.num_bytes)
    assert counts["flops_over_floor"] == pytest.approx(1)


def test_a_short_last_tile_is_fetched_whole_but_small_blocks_repeat_out_of_the_cache():
    large = gpu_count.count_decode(replace(ONE, context_lens=(65,)))
    small = gpu_count.count_decode(replace(ONE, context_lens=(65,), block_size=16))
    assert large["copied_over_floor"] == small["copied_over_floor"]
    row_bytes = 2 * 64 * 2
    difference = (large["hbm_over_floor"] - small["hbm_over_floor"]) * replace(ONE, context_lens=(65,)).num_bytes
    assert difference == pytest.approx((128 - 80) * row_bytes)


def test_a_prefill_walks_up_to_the_diagonal():
    counts = gpu_count.count_prefill(Workload(context_lens=(256,), num_new=(256,), num_heads=1, num_kv_heads=1))
    assert counts["thread_blocks"] == 2
    assert counts["copied_bytes"] == (1 + 2) * 128 * 2 * 128 * 2
    assert counts["flops_over_floor"] == pytest.approx(3 * 128 * 128 / (256 * 257 / 2))
