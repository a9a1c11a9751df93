"""What the operations of the block manager cost, counted and not timed."""

from collections import OrderedDict

import pytest
from fake_device import admit, run_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.sequence import Sequence


@pytest.fixture
def num_hashes(monkeypatch):
    """Counts calls of `compute_hash`, in a list of one number."""
    count = [0]
    compute_hash = BlockManager.compute_hash

    def counted(token_ids, prefix=-1):
        count[0] += 1
        return compute_hash(token_ids, prefix)

    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(counted))
    return count


def test_a_full_block_is_hashed_once_however_often_it_is_asked_for(num_hashes):
    manager = BlockManager(16, 4)
    holder = admit(manager, range(100, 148))
    admit(manager, range(9))
    assert num_hashes == [12 + 2]
    num_hashes[0] = 0
    waiting = Sequence(range(17), block_size=4)  # shares two blocks, wants three more, and one is free
    for _ in range(10):
        assert manager.can_allocate(waiting) == -1
    assert num_hashes == [3]  # the two that are known and the one that ends the search
    manager.deallocate(holder)
    for num_cached_blocks in (2, 4):
        assert manager.can_allocate(waiting) == num_cached_blocks
        manager.allocate(waiting, num_cached_blocks)
        run_tokens(manager, waiting)
        manager.deallocate(waiting)  # as preemption does
    assert num_hashes == [4]


_COUNTED = [
    "__contains__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__len__",
    "get",
    "add",
    "remove",
    "pop",
    "popitem",
    "index",
    "copy",
]


class _Counter:
    """Puts containers into a manager that count what is asked of them, an iteration once per element."""

    def __init__(self, manager: BlockManager):
        self.num_operations = 0
        manager.free_block_ids = self._counted(OrderedDict).fromkeys(range(len(manager.blocks)))
        manager.used_block_ids = self._counted(set)()
        manager.hash_to_block_id = self._counted(dict)()
        manager.blocks = self._counted(list)(manager.blocks)
        self.num_operations = 0

    def _counted(self, kind):
        methods = {name: self._count(getattr(kind, name)) for name in _COUNTED if hasattr(kind, name)}
        return type(f"Counted{kind.__name__}", (kind,), {**methods, "__iter__": self._count_elements(kind)})

    def _count(self, method):
        def counted(*args, **kwargs):
            self.num_operations += 1
            return method(*args, **kwargs)

        return counted

    def _count_elements(self, kind):
        def iterate(container):
            for element in kind.__iter__(container):
                self.num_operations += 1
                yield element

        return iterate


def _operations_of_a_busy_life(num_blocks: int) -> list[int]:
    """What each operation cost, in container operations, in a scenario that touches the middle of the free list."""
    manager = BlockManager(num_blocks, 4)
    counter = _Counter(manager)
    costs = []

    def note():
        costs.append(counter.num_operations)
        counter.num_operations = 0

    seqs = [admit(manager, range(100 * i, 100 * i + 9)) for i in range(4)]
    note()
    for seq in seqs:
        manager.deallocate(seq)
    note()
    again = Sequence([*range(200, 208), 5, 6, 7, 8], block_size=4)
    num_cached_blocks = manager.can_allocate(again)
    assert num_cached_blocks == 2
    note()
    manager.allocate(again, num_cached_blocks)
    note()
    run_tokens(manager, again)
    note()
    again.append_token(3)
    assert manager.can_append(again)
    manager.may_append(again)
    note()
    manager.deallocate(again)
    note()
    return costs


def test_no_operation_costs_more_in_a_larger_pool():
    small = _operations_of_a_busy_life(24)
    assert min(small) > 0
    assert small == _operations_of_a_busy_life(5000)


@given(st.integers(1, 60))
@settings(deadline=None)
def test_allocation_costs_a_bounded_number_of_operations_per_block(num_blocks):
    manager = BlockManager(64, 2)
    counter = _Counter(manager)
    seq = Sequence(range(2 * num_blocks), block_size=2)
    manager.allocate(seq, manager.can_allocate(seq))
    manager.deallocate(seq)
    assert counter.num_operations <= 10 * num_blocks + 10
