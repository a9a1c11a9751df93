"""Twenty minutes of random arrivals and aborts over a pool so small that preemption is constant.

The first half with steps in turn, the second with each step dispatched before the ids of the one before are read.
"""

import dataclasses
import os
from collections import Counter
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from engines import assert_all_blocks_free, forget, make_llm

from jaxvllm import SamplingParams

SOAK_S = float(os.environ.get("JAXVLLM_SOAK_S", 1200))  # for a shorter look while working on the engine
NUM_KINDS = 60  # different requests; their solo runs are made once, at the start
NUM_BLOCKS = 14
WARM_UP_SHARE = 0.25  # of the soak, before memory is read for the first time
GROWTH_LIMIT_MB = 20
VOCAB = 200


def make_kinds(rng):
    """Requests with shared prefixes, greedy and seeded, from a few tokens to most of the pool."""
    trunk = rng.integers(0, VOCAB, 24).tolist()
    kinds = []
    for i in range(NUM_KINDS):
        prompt = trunk[: int(rng.integers(0, 24))] + rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()
        temperature = float(rng.choice([0.0, 0.9]))
        params = SamplingParams(temperature, max_tokens=int(rng.integers(1, 16)), ignore_eos=True, seed=i)
        kinds.append((prompt, params))
    return kinds


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """Drives the engine; knows what each request in flight must answer."""

    def __init__(self, llm, kinds, expected, rng):
        self.llm, self.kinds, self.expected, self.rng = llm, kinds, expected, rng
        self.in_flight: dict[int, int] = {}  # request id -> kind
        self.counts = Counter()
        preempt = llm.engine.scheduler.preempt
        llm.engine.scheduler.preempt = lambda seq: (self.counts.update(preempted=1), preempt(seq))

    def turn(self):
        """New requests, perhaps an abort, and a step."""
        for _ in range(self.rng.poisson(0.4) if len(self.in_flight) < 12 else 0):
            kind = int(self.rng.integers(NUM_KINDS))
            self.in_flight[self.llm.add_request(*self.kinds[kind])] = kind
        if self.in_flight and self.rng.random() < 0.02:
            self.abort(int(self.rng.choice(list(self.in_flight))))
        self.step()

    def step(self):
        for output in self.llm.step():
            kind = self.in_flight.pop(output.request_id)
            assert output.token_ids == self.expected[kind], f"kind {kind} is not as in its solo run"
            self.counts.update(finished=1)

    def abort(self, request_id: int):
        kind = self.in_flight.pop(request_id)
        output = self.llm.abort(request_id)
        assert output is not None
        assert output.token_ids == self.expected[kind][: len(output.token_ids)]
        self.counts.update(aborted=1)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 600)
def test_soak_ends_every_request_as_its_solo_run_and_leaks_nothing(tiny_llama_path, capsys):
    rng = np.random.default_rng(0)
    kinds = make_kinds(rng)
    llm = make_llm(
        tiny_llama_path,
        num_kvcache_blocks=NUM_BLOCKS,
        max_num_batched_tokens=32,
        token_buckets=(8, 32),
        async_scheduling=False,  # for the first half
    )
    expected = []
    for prompt, params in kinds:
        forget(llm)
        expected.append(llm.generate([prompt], params, use_tqdm=False)[0].token_ids)
    forget(llm)

    soak = Soak(llm, kinds, expected, rng)
    start = monotonic()
    early_mb, is_overlapped = None, False
    while (elapsed := monotonic() - start) < SOAK_S:
        if not is_overlapped and elapsed > SOAK_S / 2:
            is_overlapped = True
            llm.engine.config = dataclasses.replace(llm.config, async_scheduling=True)
        soak.turn()
        if early_mb is None and elapsed > WARM_UP_SHARE * SOAK_S:
            early_mb = resident_mb()
    growth_mb = resident_mb() - (early_mb or 0)
    while not llm.is_finished():
        soak.step()

    with capsys.disabled():
        print(f"\nsoak: {SOAK_S:.0f} s, {dict(soak.counts)}, memory {growth_mb:+.1f} MB after the warm-up")
    assert not soak.in_flight
    assert soak.counts["finished"] > 100
    assert soak.counts["preempted"] > soak.counts["finished"] / 20
    assert soak.counts["aborted"] > 0
    assert growth_mb < GROWTH_LIMIT_MB
    assert_all_blocks_free(llm)
