import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.engine.cache_size import choose_num_blocks

GIB = 2**30
CONFIG = EngineConfig(model="folder", max_model_len=1024, kvcache_block_size=16, gpu_memory_utilization=0.5)


class FakeDevice:
    """Reports its memory, or (the CPU) does not."""

    def __init__(self, limit=None, in_use=0):
        self.stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self):
        return self.stats


def test_accelerator_gives_its_share_less_weights_and_temporaries():
    blocks = choose_num_blocks(CONFIG, FakeDevice(16 * GIB, 2 * GIB), GIB // 64, lambda: GIB)
    assert blocks == (8 - 2 - 1) * 64


def test_room_below_one_sequence_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"room for 16 tokens .*max_model_len=1024 needs 64.00 GiB"):
        choose_num_blocks(CONFIG, FakeDevice(16 * GIB, 6 * GIB), GIB, lambda: GIB)


def test_more_in_use_than_the_share_is_refused_too():
    with pytest.raises(ValueError, match=r"room for 0 tokens"):
        choose_num_blocks(CONFIG, FakeDevice(16 * GIB, 10 * GIB), GIB, lambda: 0)


def test_pool_is_never_larger_than_all_sequences_can_use():
    config = EngineConfig(model="folder", max_model_len=64, max_num_seqs=3, kvcache_block_size=16)
    assert choose_num_blocks(config, FakeDevice(16 * GIB), 1, lambda: 0) == 3 * 4


def test_cpu_takes_a_modest_share_without_compiling_a_probe():
    def probe():
        raise AssertionError("the CPU reports no memory to subtract temporaries from")

    blocks = choose_num_blocks(EngineConfig(model="folder"), FakeDevice(), 2**20, probe)
    assert 256 <= blocks <= 4096  # one sequence of 4,096 tokens at least, 4 GiB at most
