"""Text in, text out: the shapes of prompts and parameters, NanoVLLM's script, chat, streams."""

from itertools import zip_longest

import numpy as np
import pytest
from engines import GREEDY, assert_all_blocks_free, forget, make_llm

from jaxvllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_llama_path):
    return make_llm(tiny_llama_path)


@pytest.fixture(autouse=True)
def _fresh(llm):
    forget(llm)


PARAMS = SamplingParams(**GREEDY, max_tokens=6)


def test_outputs_come_in_input_order_whatever_ends_first(llm):
    params = [SamplingParams(**GREEDY, max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate(["one", "two", "three"], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [9, 1, 5]


@pytest.mark.parametrize("prompts", ["hello", ["hello"]])
def test_one_prompt_may_stand_alone(llm, prompts):
    """Fault case 16: a bare string is one prompt."""
    [output] = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert output.num_prompt_tokens == len(llm.tokenizer.encode("hello"))


def test_one_list_of_token_ids_is_one_prompt(llm):
    [output] = llm.generate([5, 6, 7], PARAMS, use_tqdm=False)
    assert output.num_prompt_tokens == 3


def test_text_and_its_token_ids_give_the_same(llm):
    text, ids = llm.generate(["hello there", llm.tokenizer.encode("hello there")], PARAMS, use_tqdm=False)
    assert text.token_ids == ids.token_ids
    assert text.text == llm.tokenizer.decode(text.token_ids)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], PARAMS, use_tqdm=False) == []


def test_parameters_that_do_not_match_the_prompts_are_refused(llm):
    """Fault case 16: a shorter list of sampling parameters than prompts."""
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [PARAMS], use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["a"], {"temperature": 0}, use_tqdm=False)
    assert llm.is_finished()


@pytest.mark.parametrize(
    "prompts", [None, 7, np.array(5), b"ab", [None], ["a", np.array(5)], [b"ab"], [{"prompt": "a"}], [["a", "b"]]]
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert llm.is_finished()


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    [chat] = llm.chat(messages, PARAMS, use_tqdm=False)
    [plain] = llm.generate([llm.tokenizer.apply_chat_template(messages)], PARAMS, use_tqdm=False)
    assert chat.token_ids == plain.token_ids
    assert len(llm.chat([messages, messages], PARAMS, use_tqdm=False)) == 2


@pytest.mark.parametrize("messages", [[], None, 5, "hi", {"role": "user", "content": "x"}, [["hi"]]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, PARAMS, use_tqdm=False)


def test_stream_yields_the_text_of_generate(llm):
    [whole] = llm.generate(["hello"], PARAMS, use_tqdm=False)
    assert "".join(llm.stream("hello", PARAMS)) == whole.text


def test_closed_stream_aborts_its_request(llm):
    stream = llm.stream("hello", SamplingParams(**GREEDY, max_tokens=50))
    next(stream)
    stream.close()
    assert llm.is_finished()


LONG = SamplingParams(**GREEDY, max_tokens=12)


def test_stream_that_was_never_read_has_queued_nothing(llm):
    llm.stream("hello", LONG).close()
    assert llm.is_finished()


def test_stream_refuses_a_bad_prompt_before_it_is_read(llm):
    with pytest.raises(ValueError, match="empty"):
        llm.stream([], LONG)


@pytest.mark.parametrize("max_tokens", [2, 60])  # the call inside ends before the stream, and after it
def test_generate_inside_a_stream_leaves_the_stream_whole(llm, max_tokens):
    [whole] = llm.generate("hello", LONG, use_tqdm=False)
    texts = []
    for text in llm.stream("hello", LONG):
        texts.append(text)
        if len(texts) == 1:
            [inner] = llm.generate("other", SamplingParams(**GREEDY, max_tokens=max_tokens), use_tqdm=False)
            assert len(inner.token_ids) == max_tokens
    assert "".join(texts) == whole.text
    assert llm.is_finished()
    assert_all_blocks_free(llm)


def test_two_streams_read_in_turns_are_both_whole(llm):
    [whole] = llm.generate("hello", LONG, use_tqdm=False)
    pairs = zip_longest(llm.stream("hello", LONG), llm.stream("hello", LONG), fillvalue="")
    first, second = zip(*pairs, strict=True)
    assert "".join(first) == "".join(second) == whole.text


def test_output_is_not_lost_when_a_later_step_fails(llm, monkeypatch):
    request_id = llm.add_request("first", SamplingParams(**GREEDY, max_tokens=1))
    llm.generate("second", SamplingParams(**GREEDY, max_tokens=4), use_tqdm=False)
    other = llm.add_request("third", PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner, "dispatch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    ended = [output.request_id for output in llm.step()]
    while not llm.is_finished():
        ended += [output.request_id for output in llm.step()]
    assert ended == [request_id, other]


def test_request_that_ends_inside_another_call_is_returned_by_the_next_step(llm):
    request_id = llm.add_request("first", SamplingParams(**GREEDY, max_tokens=2))
    llm.generate("second", SamplingParams(**GREEDY, max_tokens=9), use_tqdm=False)
    assert not llm.is_finished()
    assert [output.request_id for output in llm.step()] == [request_id]
    assert llm.is_finished()
    assert llm.step() == []


def test_progress_bar_shows_both_rates(llm, capsys):
    llm.generate(["hello"], PARAMS)
    shown = capsys.readouterr().err
    assert "Prefill=" in shown
    assert "Decode=" in shown


def test_misspelt_option_is_refused_before_anything_loads():
    with pytest.raises(ValueError, match="did you mean 'max_num_seqs'"):
        LLM("no/such/folder/at/all", max_num_seq=3)


def test_stats_count_what_ran(tiny_llama_path):
    llm = make_llm(tiny_llama_path)
    llm.generate([[1, 2, 3], [4, 5]], PARAMS, use_tqdm=False)
    stats = llm.stats
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_decode_tokens) == (5, 12, 10)
    assert stats.prefill_tokens_per_s > 0
    assert stats.decode_tokens_per_s > 0
    assert stats.compiled.num_requests >= 2


def test_a_folder_without_a_model_is_refused_before_its_tokenizer_is_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        LLM(str(tmp_path))


def test_a_length_beyond_the_model_s_is_cut_and_said(tiny_llama_path, caplog):
    engine = make_llm(tiny_llama_path, max_model_len=100_000, block_buckets=()).engine
    (line,) = [line for line in caplog.messages if "max_model_len" in line]
    assert line == f"max_model_len=100000 is cut to the model's {engine.config.max_model_len}."
