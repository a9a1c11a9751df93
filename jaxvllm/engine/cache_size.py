"""How many blocks the KV cache gets when the user does not say."""

import os
from collections.abc import Callable
from typing import Any, Protocol

from jaxvllm.config import EngineConfig


class Device(Protocol):
    """What is asked of a `jax.Device`."""

    def memory_stats(self) -> dict[str, Any] | None: ...  # bytes_limit, bytes_in_use; the CPU has none


_CPU_CACHE_BYTES = 4 * 2**30  # at most: the machine has other work
_CPU_SHARE = 0.25  # of the memory that is free


def choose_num_blocks(
    config: EngineConfig, device: Device, block_bytes: int, measure_temporaries: Callable[[], int]
) -> int:
    """Returns the number of blocks that fit the device, all layers counted in `block_bytes`.

    On a TPU or GPU that is `gpu_memory_utilization` of its memory, less what is in use (the weights) and less the
    bytes of the largest step's temporaries, which `measure_temporaries` compiles to find. On the CPU it is a modest
    share of the free memory. Never more than `max_num_seqs` sequences of `max_model_len` can use. Raises
    `ValueError` when not even one such sequence fits.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        temporaries = measure_temporaries()
        limit, in_use = stats["bytes_limit"], stats["bytes_in_use"]
        budget = int(limit * config.gpu_memory_utilization) - in_use - temporaries
        account = (
            f"{config.gpu_memory_utilization} of {_gib(limit)}, less {_gib(in_use)} in use and "
            f"{_gib(temporaries)} of temporaries"
        )
    else:
        free = _free_host_bytes()
        budget = min(_CPU_CACHE_BYTES, int(free * _CPU_SHARE))
        account = f"{_CPU_SHARE} of {_gib(free)} free, at most {_gib(_CPU_CACHE_BYTES)}"

    fitting = max(0, budget // block_bytes)
    if fitting < config.max_blocks_per_seq:
        raise ValueError(
            f"the KV cache has room for {fitting * config.kvcache_block_size} tokens ({account}), and one sequence of "
            f"max_model_len={config.max_model_len} needs {_gib(config.max_blocks_per_seq * block_bytes)}: lower "
            "max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization."
        )
    return min(fitting, config.max_num_seqs * config.max_blocks_per_seq)


def _free_host_bytes() -> int:
    """Memory that a new process can have, in bytes; what the system calls available where it says so."""
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":", 1) for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
