"""The real Gemma 3 270M, from the GGUF file that `python -m jaxvllm.demo gemma3` fetches; skipped where it is not."""

import pytest
from engines import GREEDY, make_llm

from jaxvllm import SamplingParams
from jaxvllm.convert import convert
from jaxvllm.demo import GEMMA3, cached_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not cached_path(GEMMA3).exists(), reason="the model is not here: `python -m jaxvllm.demo gemma3` fetches it"
    ),
]

PROMPT = "The three primary colours are"
LONG_PROMPT = "The sea was calm that morning, and nobody on the island had seen a ship for weeks. " * 40 + PROMPT


def make(path):
    return make_llm(
        path,
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        kvcache_block_size=16,
        num_kvcache_blocks=160,
    )


@pytest.fixture(scope="module")
def llm():
    return make(cached_path(GEMMA3))


def test_it_knows_the_primary_colours(llm):
    params = SamplingParams(**GREEDY, max_tokens=16)
    [first] = llm.generate([PROMPT], params, use_tqdm=False)
    assert first.text.startswith(" red, yellow and blue.")
    [again] = llm.generate([PROMPT], params, use_tqdm=False)
    assert again.token_ids == first.token_ids


def test_a_prompt_longer_than_its_windows_is_the_same_in_chunks_and_from_the_cache(llm):
    """More than 512 tokens: its sliding layers no longer see the beginning."""
    assert len(llm.tokenizer.encode(LONG_PROMPT)) > 600
    params = SamplingParams(**GREEDY, max_tokens=16)
    [cold] = llm.generate([LONG_PROMPT], params, use_tqdm=False)
    [warm] = llm.generate([LONG_PROMPT], params, use_tqdm=False)
    assert warm.num_cached_tokens > 512
    assert warm.token_ids == cold.token_ids


@pytest.mark.timeout(1800)  # a busy machine takes its time
def test_it_gives_the_same_tokens_after_conversion(llm, tmp_path):
    convert(str(cached_path(GEMMA3)), tmp_path / "gemma", dtype="float32")
    params = SamplingParams(**GREEDY, max_tokens=16)
    prompts = [PROMPT, LONG_PROMPT]
    expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    converted = make(tmp_path / "gemma")
    found = converted.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in found] == expected
    assert found[0].text.startswith(" red, yellow and blue.")


def test_text_comes_back_from_its_tokens(llm):
    for text in ("Grüße, 漢字 and  two spaces", "a\n\nb\tc", "1234567 🙂"):
        assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
