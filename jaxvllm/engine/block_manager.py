"""Which KV-cache block belongs to whom. Ids and hashes only: the keys and values are on the device."""

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np
import xxhash

from jaxvllm.engine.sequence import Sequence

_SMALLEST_BLOCK_SIZE = 2  # the rule for a new block, length % block_size == 1, never holds at 1


class Block:
    """One block of the pool: who holds it and, once it is full and computed, what it holds.

    `hash` and `token_ids` outlive the last holder: a free block is found again until someone else gets it.
    """

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")  # a pool may have a million of them

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1  # -1: not full, or not computed
        self.token_ids: list[int] = []

    def update(self, hash: int, token_ids: list[int]):
        self.hash = hash
        self.token_ids = token_ids

    def reset(self):
        self.ref_count = 1
        self.hash = -1
        self.token_ids = []


class BlockManager:
    """Owns the ids of the KV-cache blocks.

    Every id is either free or referenced, never both. `hash_to_block_id` names, for a chain of full blocks,
    the block that ends it, referenced or free. An operation costs what the blocks of its sequence cost,
    however large the pool, and a full block of a sequence is hashed once in the sequence's life.
    """

    def __init__(self, num_blocks: int, block_size: int):
        """Raises `ValueError` on an empty pool or a block size below 2."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is below 1: a pool needs at least one block.")
        if block_size < _SMALLEST_BLOCK_SIZE:
            raise ValueError(
                f"block_size={block_size} is below {_SMALLEST_BLOCK_SIZE}: a block holds at least two tokens."
            )
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        # A queue from which a prefix hit takes an id in the middle: a deque would search for it, and a plain
        # dict would walk over the holes left at its front.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()

    @property
    def max_seq_tokens(self) -> int:
        """Tokens, prompt and completion, of the longest sequence that can finish in this pool.

        The last token is sampled and never run, so it needs no slot; a prompt may thus have one token less.
        """
        return len(self.blocks) * self.block_size + 1

    @classmethod
    def compute_hash(cls, token_ids: list[int] | np.ndarray, prefix: int = -1) -> int:
        """Returns xxh64 of the previous block's hash (left out at -1) and the ids, as little-endian int64."""
        chain = b"" if prefix == -1 else prefix.to_bytes(8, "little")
        return xxhash.xxh64_intdigest(chain + struct.pack(f"<{len(token_ids)}q", *token_ids))

    def can_allocate(self, seq: Sequence) -> int:
        """Returns how many of its first blocks are in the cache, or -1 when the rest does not fit.

        The last block never counts, full or not: at least one token has to run to give logits. A sequence
        that waits for room asks at every step: a no costs a look-up per block, a yes compares the tokens too.
        """
        cached_ids = self._look_up(seq)
        if not self._has_room(seq, cached_ids):
            return -1
        for i, block_id in enumerate(cached_ids):
            if self.blocks[block_id].token_ids != seq.block(i):  # an equal hash over another content
                return i if self._has_room(seq, cached_ids[:i]) else -1
        return len(cached_ids)

    def allocate(self, seq: Sequence, num_cached_blocks: int):
        """Fills its block table: what `can_allocate` found in the cache, and free blocks for the rest."""
        assert not seq.block_table, f"sequence {seq.seq_id} has blocks already"
        for i in range(num_cached_blocks):
            block_id = self.hash_to_block_id[self._chain_hash(seq, i)]
            if block_id not in self.used_block_ids:
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)
        for _ in range(num_cached_blocks, seq.num_blocks):
            seq.block_table.append(self._allocate_block())
        seq.num_cached_tokens = num_cached_blocks * self.block_size
        if seq.num_tokens == seq.num_prompt_tokens:  # not yet preempted: that takes a first token
            seq.num_cached_prompt_tokens = seq.num_cached_tokens

    def deallocate(self, seq: Sequence):
        """Gives its blocks back, last one first: the end of a chain is reused before its beginning."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is a slot for its last token, which the coming decode step will run."""
        return bool(self.free_block_ids) or seq.num_tokens % self.block_size != 1

    def may_append(self, seq: Sequence):
        """Adds a block when its last token is the first of a block."""
        if seq.num_tokens % self.block_size == 1:
            seq.block_table.append(self._allocate_block())

    def hash_blocks(self, seq: Sequence):
        """Enters the blocks that this step filled into the prefix cache."""
        start = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        for i in range(start, end):
            self.hash_block(seq, i)

    def hash_block(self, seq: Sequence, i: int):
        """Enters its i-th block, which is full, into the prefix cache."""
        block_id = seq.block_table[i]
        chain_hash = self._chain_hash(seq, i)
        self.blocks[block_id].update(chain_hash, seq.block(i))
        self.hash_to_block_id[chain_hash] = block_id

    def forget_contents(self):
        """Empties the prefix cache; no block may be in use. Cost: the whole pool."""
        assert not self.used_block_ids, f"{len(self.used_block_ids)} blocks are in use"
        self.hash_to_block_id.clear()
        for block in self.blocks:
            block.update(-1, [])

    def check_integrity(self, seqs: Iterable[Sequence]):
        """Asserts that every block is accounted for, given all sequences that may hold one. Cost: the whole pool."""
        seqs = list(seqs)
        holders = Counter(block_id for seq in seqs for block_id in seq.block_table)
        for block in self.blocks:
            block_id = block.block_id
            is_free, is_used = block_id in self.free_block_ids, block_id in self.used_block_ids
            state = f"block {block_id}: free {is_free}, used {is_used}, ref_count {block.ref_count}"
            assert is_free != is_used, state
            assert is_used == (block.ref_count > 0), state
            assert block.ref_count == holders[block_id], f"{state}, in {holders[block_id]} block tables"
        num_listed = len(self.free_block_ids) + len(self.used_block_ids)
        assert num_listed == len(self.blocks), f"{num_listed} ids listed for {len(self.blocks)} blocks"
        for chain_hash, block_id in self.hash_to_block_id.items():
            block = self.blocks[block_id]
            assert block.hash == chain_hash, f"block {block_id} is indexed under another hash"
            assert len(block.token_ids) == self.block_size, f"block {block_id} is indexed, not full"
        for seq in seqs:
            for i in range((seq.num_cached_tokens - seq.num_pending_tokens) // self.block_size):
                block = self.blocks[seq.block_table[i]]
                place = f"block {block.block_id}, {i} of sequence {seq.seq_id}"
                assert block.token_ids == seq.block(i), f"{place}: other tokens"
                assert block.hash == self._chain_hash(seq, i), f"{place}: another chain's hash"

    def _look_up(self, seq: Sequence) -> list[int]:
        """The cached blocks of its longest known prefix, short of its last block, by hash alone."""
        block_ids = []
        for i in range(seq.num_blocks - 1):
            block_id = self.hash_to_block_id.get(self._chain_hash(seq, i))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _has_room(self, seq: Sequence, cached_ids: list[int]) -> bool:
        """Whether its blocks fit; a cached one takes a free block too, itself, unless someone holds it."""
        num_shared = sum(block_id in self.used_block_ids for block_id in cached_ids)
        return seq.num_blocks - num_shared <= len(self.free_block_ids)

    def _allocate_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is free and has {block.ref_count} holders"
        if self.hash_to_block_id.get(block.hash) == block_id:  # a newer block may have taken the hash over
            del self.hash_to_block_id[block.hash]
        block.reset()
        self.used_block_ids.add(block_id)
        return block_id

    def _chain_hash(self, seq: Sequence, i: int) -> int:
        """The hash of its i-th block, a full one, with all before it; computed on the first call."""
        hashes = seq.block_hashes
        while len(hashes) <= i:
            hashes.append(self.compute_hash(seq.block(len(hashes)), hashes[-1] if hashes else -1))
        return hashes[i]
