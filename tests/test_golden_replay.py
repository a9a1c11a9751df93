"""The metadata layer against NanoVLLM's own decisions, recorded step by step.

`data/nanovllm_traces.jsonl.gz` holds 300 random workloads run through NanoVLLM's `Scheduler` and
`BlockManager` (public commit bb823b3). No field of any step may differ.
"""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.sequence import Sequence
from jaxvllm.sampling_params import SamplingParams

_TRACES = Path(__file__).parent / "data" / "nanovllm_traces.jsonl.gz"
_NUM_WORKLOADS = 300
_NUM_STEPS = 44_634


@cache
def _lines() -> list[str]:
    with gzip.open(_TRACES, "rt", encoding="ascii") as lines:
        return list(lines)


def _load(number: int) -> dict[str, Any]:
    return json.loads(_lines()[number])  # Python's own parser keeps integers of 64 bits whole


class _Config(NamedTuple):
    """What a scheduler reads; `EngineConfig` would refuse some of the recorded limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    eos: int
    kvcache_block_size: int
    num_kvcache_blocks: int


class _Replay:
    """One recorded workload, run again."""

    def __init__(self, trace: dict[str, Any]):
        config = trace["config"]
        self.trace = trace
        self.scheduler = Scheduler(
            _Config(
                max_num_seqs=config["max_num_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                eos=config["eos"],
                kvcache_block_size=config["block_size"],
                num_kvcache_blocks=config["num_blocks"],
            )
        )
        self.seqs = {
            number: Sequence(
                request["prompt"],
                SamplingParams(max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"]),
                block_size=config["block_size"],
                seq_id=number,
            )
            for number, request in enumerate(trace["requests"])
        }
        self._to_add = list(trace["added"])

    def run_step(self, number: int) -> dict[str, Any]:
        """Runs a step with the recorded tokens; returns its fields as the recording has them."""
        while self._to_add and self.trace["requests"][self._to_add[0]]["arrival"] <= number:
            self.scheduler.add(self.seqs[self._to_add.pop(0)])
        seqs, is_prefill = self.scheduler.schedule()
        rows = [[seq.seq_id, seq.num_cached_tokens, seq.num_scheduled_tokens, list(seq.block_table)] for seq in seqs]
        tokens = self.trace["steps"][number]["tokens"]
        if len(tokens) == len(seqs):  # if not, the rows differ, and the caller says so
            self.scheduler.postprocess(seqs, tokens, is_prefill)
        manager = self.scheduler.block_manager
        used = [[block_id, manager.blocks[block_id].ref_count] for block_id in sorted(manager.used_block_ids)]
        return {
            "prefill": is_prefill,
            "rows": rows,
            "tokens": tokens,
            "free": list(manager.free_block_ids),
            "used": used,
            "index": [list(entry) for entry in sorted(manager.hash_to_block_id.items())],
        }

    def outputs(self) -> list[list[int]]:
        return [seq.completion_token_ids for seq in self.seqs.values()]


@pytest.mark.parametrize("workload", range(_NUM_WORKLOADS))
def test_every_field_of_every_step_is_as_recorded(workload):
    trace = _load(workload)
    where = f"workload {workload} (seed {trace['seed']})"
    replay = _Replay(trace)
    for number, recorded in enumerate(trace["steps"]):
        step = replay.run_step(number)
        assert step.keys() == recorded.keys(), f"{where}: the recording has other fields: {list(recorded)}"
        for field, value in recorded.items():
            assert step[field] == value, f"{where}, step {number}, field {field!r}"
    assert replay.outputs() == trace["outputs"], f"{where}, field 'outputs'"
    assert replay.scheduler.is_finished(), f"{where}: unfinished after the last recorded step"
    replay.scheduler.block_manager.check_integrity([])


def test_the_recording_covers_300_workloads_and_44634_steps():
    assert len(_lines()) == _NUM_WORKLOADS
    assert sum(len(_load(workload)["steps"]) for workload in range(_NUM_WORKLOADS)) == _NUM_STEPS


def test_the_recording_reaches_every_kind_of_decision():
    """Otherwise a replay would prove little."""
    kinds = {"shared block", "prefix hit", "chunked prefill", "preemption", "length", "end id"}
    seen = set()
    for workload in range(_NUM_WORKLOADS):
        trace = _load(workload)
        admitted = set()
        last_rows: dict[int, int] = {}
        for step in trace["steps"]:
            if any(ref_count > 1 for _, ref_count in step["used"]):
                seen.add("shared block")
            for number, num_cached, num_scheduled, _ in step["rows"]:
                prompt = trace["requests"][number]["prompt"]
                if number not in admitted and num_cached:
                    seen.add("prefix hit")
                if step["prefill"] and num_cached + num_scheduled < len(prompt):
                    seen.add("chunked prefill")
                if number in admitted and num_cached + num_scheduled <= last_rows[number]:
                    seen.add("preemption")
                admitted.add(number)
                last_rows[number] = num_cached + num_scheduled
        for request, output in zip(trace["requests"], trace["outputs"], strict=True):
            seen.add("length" if len(output) == request["max_tokens"] else "end id")
    assert seen == kinds
