"""The block manager as one would first write it: NanoVLLM's rules step by step, the baseline of `bench metadata`.

Two habits make it slow, and both are kept: a block that is found in the cache is searched for in the queue of free
blocks, which may be the whole pool; and a prompt is hashed when the scheduler asks about it and again when it gets
its blocks. Sequences are the engine's own; `block_hashes` is not used.
"""

from collections import deque
from collections.abc import Sequence as AnySequence

import numpy as np
import xxhash

from jaxvllm.engine.sequence import Sequence


class PlainBlock:
    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1
        self.token_ids: list[int] = []


class PlainBlockManager:
    """The same methods and the same decisions as `BlockManager`, those that the benchmark calls."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.blocks = [PlainBlock(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = deque(range(num_blocks))
        self.used_block_ids: set[int] = set()

    @staticmethod
    def compute_hash(token_ids: AnySequence[int], prefix: int = -1) -> int:
        digest = xxhash.xxh64()
        if prefix != -1:
            digest.update(prefix.to_bytes(8, "little"))
        digest.update(np.array(token_ids, np.dtype("<i8")).tobytes())
        return digest.intdigest()

    def can_allocate(self, seq: Sequence) -> int:
        num_cached, num_needed = 0, seq.num_blocks
        chain_hash = -1
        for i in range(seq.num_blocks - 1):
            chain_hash = self.compute_hash(seq.block(i), chain_hash)
            block_id = self.hash_to_block_id.get(chain_hash, -1)
            if block_id == -1 or self.blocks[block_id].token_ids != seq.block(i):
                break
            num_cached += 1
            num_needed -= block_id in self.used_block_ids
        return num_cached if num_needed <= len(self.free_block_ids) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int):
        chain_hash = -1
        for i in range(num_cached_blocks):
            chain_hash = self.compute_hash(seq.block(i), chain_hash)
            block_id = self.hash_to_block_id[chain_hash]
            if block_id not in self.used_block_ids:
                self.free_block_ids.remove(block_id)  # searches the queue
                self.used_block_ids.add(block_id)
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)
        for _ in range(num_cached_blocks, seq.num_blocks):
            seq.block_table.append(self._take_block())
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def deallocate(self, seq: Sequence):
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if not block.ref_count:
                self.used_block_ids.remove(block_id)
                self.free_block_ids.append(block_id)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def hash_blocks(self, seq: Sequence):
        first = seq.num_cached_tokens // self.block_size
        last = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        chain_hash = self.blocks[seq.block_table[first - 1]].hash if first else -1
        for i in range(first, last):
            chain_hash = self.compute_hash(seq.block(i), chain_hash)
            block = self.blocks[seq.block_table[i]]
            block.hash, block.token_ids = chain_hash, seq.block(i)
            self.hash_to_block_id[chain_hash] = block.block_id

    def _take_block(self) -> int:
        block_id = self.free_block_ids.popleft()
        block = self.blocks[block_id]
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.ref_count, block.hash, block.token_ids = 1, -1, []
        self.used_block_ids.add(block_id)
        return block_id
