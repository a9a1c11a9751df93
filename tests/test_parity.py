"""The engine against transformers: greedy tokens recorded in float32, all of them, whatever the batching."""

import json
from pathlib import Path

import numpy as np
import pytest
from engines import GREEDY, assert_all_blocks_free, make_llm
from model_steps import assert_equals_transformers, prefill
from tiny_models import CONFIGS, tiny_model

from jaxvllm import SamplingParams
from jaxvllm.demo import demo_model_path
from jaxvllm.models import registry
from jaxvllm.models.checkpoint.loader import load_model

DATA = Path(__file__).parent / "data"
TINY = json.loads((DATA / "expected_tiny.json").read_text())
BFLOAT16 = json.loads((DATA / "expected_smollm2_bfloat16.json").read_text())
SMOLLM2 = json.loads((DATA / "expected_smollm2.json").read_text())
LARGEST_LOGIT_DIFFERENCE = 1e-3


def run(llm, recorded):
    """Runs the recorded prompts together; returns tokens and cached prompt tokens."""
    prompts = [prompt["prompt_token_ids"] for prompt in recorded["prompts"]]
    params = SamplingParams(**GREEDY, max_tokens=len(recorded["prompts"][0]["token_ids"]))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_all_blocks_free(llm)
    return [output.token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def expected_tokens(recorded):
    return [prompt["token_ids"] for prompt in recorded["prompts"]]


def count_chunks(llm):
    """Returns a list that collects the sequence of each step that runs a part of a prompt only."""
    chunks = []
    schedule_prefill = llm.engine.scheduler._schedule_prefill  # of `schedule` and `schedule_ahead` alike

    def counting():
        seqs = schedule_prefill()
        chunks.extend(seq for seq in seqs if seq.num_cached_tokens + seq.num_scheduled_tokens < seq.num_tokens)
        return seqs

    llm.engine.scheduler._schedule_prefill = counting
    return chunks


def test_every_architecture_is_recorded():
    assert set(CONFIGS) == {case["model_type"] for case in TINY.values()} == set(registry.ARCHITECTURES)


def make_tiny_llm(path, **options):
    """Two programs: prefill in chunks of at most 96 tokens, and decode."""
    options = {"max_model_len": 400, "max_num_batched_tokens": 96, "token_buckets": (96,)} | options
    return make_llm(path, seq_buckets=(8,), kvcache_block_size=16, num_kvcache_blocks=256, **options)


def tiny_cases():
    """Every case; those beside an architecture's own are slow, their logits are compared below."""
    names = [name for name in TINY if name != "phi3_longrope"]
    return [name if name in CONFIGS else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", tiny_cases())
def test_tiny_model_gives_transformers_tokens(tmp_path, name):
    """Lengths up to 300: batched, in chunks of at most 96 tokens, then with every prefix in the cache."""
    recorded = TINY[name]
    llm = make_tiny_llm(tiny_model(tmp_path, recorded["model_type"], **recorded["overrides"]))
    chunks = count_chunks(llm)
    tokens, _ = run(llm, recorded)
    assert tokens == expected_tokens(recorded)
    assert {5, 6, 7} == {seq.seq_id for seq in chunks}, "prompts of 120, 200 and 300 tokens do not fit a step"
    tokens, cached = run(llm, recorded)
    assert tokens == expected_tokens(recorded)
    lengths = [len(prompt["prompt_token_ids"]) for prompt in recorded["prompts"]]
    assert cached == [(length - 1) // 16 * 16 for length in lengths]


@pytest.mark.parametrize(("max_model_len", "served"), [(150, slice(0, 6)), (400, slice(6, 8))])
def test_longrope_gives_transformers_tokens_on_each_side_of_the_original_context(tmp_path, max_model_len, served):
    """The longest sequence an engine serves chooses the frequencies of all of them: 150 tokens are the original."""
    recorded = TINY["phi3_longrope"] | {"prompts": TINY["phi3_longrope"]["prompts"][served]}
    path = tiny_model(tmp_path, recorded["model_type"], **recorded["overrides"])
    llm = make_tiny_llm(path, max_model_len=max_model_len)
    for _ in range(2):
        tokens, _ = run(llm, recorded)
        assert tokens == expected_tokens(recorded)


@pytest.mark.parametrize("name", [name for name in TINY if name != "phi3_longrope"])
def test_tiny_model_gives_transformers_logits(tmp_path, name):
    recorded = TINY[name]
    _, model = load_model(tiny_model(tmp_path, recorded["model_type"], **recorded["overrides"]))
    assert_equals_transformers(model, recorded)


@pytest.mark.parametrize(("max_len", "served"), [(150, slice(0, 6)), (400, slice(6, 8))])
def test_longrope_gives_transformers_logits(tmp_path, max_len, served):
    recorded = TINY["phi3_longrope"] | {"prompts": TINY["phi3_longrope"]["prompts"][served]}
    _, model = load_model(tiny_model(tmp_path, recorded["model_type"], **recorded["overrides"]))
    model.max_len = max_len
    assert_equals_transformers(model, recorded)


@pytest.mark.slow
def test_smollm2_gives_transformers_tokens_with_prefix_sharing_and_chunks(capsys):
    """20 prompts of 5 to 200 tokens, 64 new ones each, all in one run."""
    llm = make_llm(
        demo_model_path(),
        max_model_len=320,
        max_num_seqs=20,
        seq_buckets=(20,),
        max_num_batched_tokens=64,
        token_buckets=(64,),
        kvcache_block_size=16,
        num_kvcache_blocks=400,
    )
    chunks = count_chunks(llm)
    tokens, cached = run(llm, SMOLLM2)
    num_equal = sum(ours == theirs for ours, theirs in zip(tokens, expected_tokens(SMOLLM2), strict=True))
    with capsys.disabled():
        print(f"\nSmolLM2: {num_equal} of 20 prompts equal, {len(chunks)} chunks, {sum(cached)} tokens cached")
    assert num_equal == len(tokens) == 20
    assert sum(cached) > 0
    assert chunks


@pytest.mark.slow
def test_smollm2_logits_are_transformers_logits(capsys):
    _, model = load_model(demo_model_path(), dtype="float32")
    sequences = [prompt["prompt_token_ids"] + prompt["token_ids"] for prompt in SMOLLM2["prompts"]]
    largest = 0.0
    for prompt, logits in zip(SMOLLM2["prompts"], prefill(model, sequences), strict=True):
        at_steps = logits[len(prompt["prompt_token_ids"]) - 1 :][SMOLLM2["logit_steps"]]
        chosen = at_steps[:, SMOLLM2["logit_token_ids"]] - np.array(prompt["logits"])
        highest = at_steps.max(axis=-1) - np.array(prompt["max_logits"])
        largest = max(largest, float(np.abs(chosen).max()), float(np.abs(highest).max()))
    with capsys.disabled():
        print(f"\nSmolLM2: largest logit difference {largest:.1e}")
    assert largest < LARGEST_LOGIT_DIFFERENCE


@pytest.mark.slow
def test_smollm2_in_bfloat16_is_as_near_to_float32_as_transformers_is(capsys):
    """After each of the float32 tokens: what bfloat16 would choose, here and in transformers."""
    _, model = load_model(demo_model_path(), dtype="bfloat16")
    sequences = [prompt["prompt_token_ids"] + prompt["token_ids"] for prompt in SMOLLM2["prompts"]]
    largest, equal, exact_here, exact_there = 0.0, [], [], []
    for prompt, recorded, logits in zip(
        SMOLLM2["prompts"], BFLOAT16["prompts"], prefill(model, sequences), strict=True
    ):
        chosen_from = logits[len(prompt["prompt_token_ids"]) - 1 : -1]
        at_steps = chosen_from[BFLOAT16["logit_steps"]][:, BFLOAT16["logit_token_ids"]]
        largest = max(largest, float(np.abs(at_steps - np.array(recorded["logits"])).max()))
        tokens = chosen_from.argmax(axis=-1)
        equal += (tokens == recorded["token_ids"]).tolist()
        exact_here += (tokens == prompt["token_ids"]).tolist()
        exact_there += (np.array(recorded["token_ids"]) == prompt["token_ids"]).tolist()
    with capsys.disabled():
        print(
            f"\nSmolLM2 in bfloat16: largest logit difference to transformers {largest:.2f}, tokens equal "
            f"{np.mean(equal):.1%}; equal to float32: here {np.mean(exact_here):.1%}, there {np.mean(exact_there):.1%}"
        )
    assert largest < 1.0  # logits of 10 to 20 have steps of 0.06 to 0.125
    assert np.mean(equal) > 0.9
    assert np.mean(exact_here) > np.mean(exact_there) - 0.02
