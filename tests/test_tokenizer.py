"""Text to ids and back, whole and as a stream."""

import json
import shutil
import socket

import gguf_vocabularies as vocabularies
import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_tokenizer import TEXT, TEXTS, sentencepiece_record, sentencepiece_tokenizer  # noqa: F401  # fixtures

from jaxvllm.tokenizer import Detokenizer, load_tokenizer

IDS = st.lists(st.integers(0, 700), max_size=60)  # beyond every vocabulary here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_models.write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def byte_level(folder):
    return load_tokenizer(folder)


@pytest.fixture
def changed(folder, tmp_path):
    """Returns a function that copies the folder with changed JSON files."""

    def change(**files):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        for name, edit in files.items():
            path = tmp_path / f"{name}.json"
            content = json.loads(path.read_text(encoding="utf-8"))
            edit(content)
            path.write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return change


def stream(tokenizer, ids, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(byte_level, text):
    assert byte_level.decode(byte_level.encode(text)) == text


@given(text=TEXT)
@settings(max_examples=200, deadline=None)
def test_round_trip_of_any_text(byte_level, text):
    ids = byte_level.encode(text)
    assert byte_level.decode(ids) == text
    assert "".join(stream(byte_level, ids)) == text


@given(ids=IDS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_stream_adds_up_to_the_decoded_text(byte_level, ids, skip):
    assert "".join(stream(byte_level, ids, skip)) == byte_level.decode(ids, skip)


@given(ids=IDS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_stream_of_sentencepiece_adds_up_too(sentencepiece_tokenizer, ids, skip):  # noqa: F811
    assert "".join(stream(sentencepiece_tokenizer, ids, skip)) == sentencepiece_tokenizer.decode(ids, skip)


def test_half_a_character_is_held_back(byte_level):
    ids = byte_level.encode("é👍")
    assert len(ids) == 6  # no merges for these bytes
    assert stream(byte_level, ids) == ["", "é", "", "", "", "👍", ""]


def test_a_text_that_ends_inside_a_character_is_flushed(byte_level):
    ids = byte_level.encode("é")[:1]
    assert stream(byte_level, ids) == ["", "\ufffd"]
    assert byte_level.decode(ids) == "\ufffd"


def test_sentencepiece_drops_the_space_before_the_text_alone(sentencepiece_tokenizer):  # noqa: F811
    ids = sentencepiece_tokenizer.encode(" the water")
    assert "".join(stream(sentencepiece_tokenizer, ids)) == sentencepiece_tokenizer.decode(ids) == " the water"


def test_the_work_per_token_does_not_grow(byte_level, monkeypatch):
    taken = []
    piece = byte_level.piece
    monkeypatch.setattr(byte_level, "piece", lambda *args: taken.append(args) or piece(*args))
    ids = byte_level.encode("the 👍 " * 500)
    stream(byte_level, ids)
    assert len(taken) == len(ids)


def test_ids_beyond_the_vocabulary_decode_to_nothing(byte_level):
    a = byte_level.encode("a")
    ids = [byte_level.vocab_size, *a, 10**9, -1, *np.array(a, np.int32)]
    assert byte_level.decode(ids) == "".join(stream(byte_level, ids)) == "aa"


def test_decoding_agrees_with_transformers_on_text(byte_level, folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = byte_level.encode(text)
        assert ids == theirs.encode(text)
        assert byte_level.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_special_tokens_in_a_text_are_found(byte_level):
    ids = byte_level.encode("<|im_start|>a<|im_end|>")
    assert len(ids) == 3
    assert byte_level.decode(ids) == "a"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize("bad", ["half a pair: \ud800", None, 7, [1, 2]])
def test_what_is_no_text_is_refused(byte_level, bad):
    with pytest.raises(ValueError, match=r"lone surrogate|a text is needed"):
        byte_level.encode(bad)


def test_the_chat_template_opens_the_answer(byte_level):
    messages = [{"role": "user", "content": "Hi"}]
    closed = byte_level.apply_chat_template(messages, add_generation_prompt=False)
    opened = byte_level.apply_chat_template(messages)
    assert byte_level.decode(closed, False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert byte_level.decode(opened, False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list"),
        ("Hi", "messages must be a list"),
        ({"role": "user", "content": "Hi"}, "messages must be a list"),
        (["Hi"], "message 0 is str"),
        ([{"role": "user", "content": "Hi"}, {"role": "user"}], "message 1 has no text under 'content'"),
        ([{"role": "user", "content": ["Hi"]}], "message 0 has no text under 'content'"),
        ([{"content": "Hi"}], "message 0 has no text under 'role'"),
    ],
)
def test_malformed_messages_are_refused(byte_level, messages, message):
    with pytest.raises(ValueError, match=message):
        byte_level.apply_chat_template(messages)


def test_messages_that_the_template_refuses_are_a_value_error(changed):
    def edit(config):
        config["chat_template"] = "{{ raise_exception('only users speak here') }}"

    tokenizer = load_tokenizer(changed(tokenizer_config=edit))
    with pytest.raises(ValueError, match="only users speak here"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ '{a}'.format() }}", "{% if", "{{ messages[9].content.x }}"])
def test_template_that_fails_is_a_value_error(changed, template):
    tokenizer = load_tokenizer(changed(tokenizer_config=lambda config: config.update(chat_template=template)))
    with pytest.raises(ValueError, match="refuses these messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_without_a_chat_template_there_is_a_remedy(changed):
    tokenizer = load_tokenizer(changed(tokenizer_config=lambda config: config.pop("chat_template")))
    with pytest.raises(ValueError, match=r"no chat template: give a plain prompt"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_the_end_id_is_the_tokenizers_own(changed):
    def edit(config):
        config["eos_token"] = "<|endoftext|>"

    tokenizer = load_tokenizer(changed(tokenizer_config=edit))
    assert tokenizer.eos_token_ids == frozenset(tokenizer.encode("<|endoftext|>"))


def test_tokenizer_json_is_followed_whatever_class_is_named(changed):
    def split_digits(content):
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
        content["model"]["vocab"]["12"] = len(content["model"]["vocab"])
        content["model"]["merges"].append(["1", "2"])

    def name_class(config):
        config["tokenizer_class"] = "GPT2Tokenizer"

    assert len(load_tokenizer(changed(tokenizer=split_digits, tokenizer_config=name_class)).encode("12")) == 2


def test_long_texts_are_never_cut(changed):
    def cut(content):
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}

    assert len(load_tokenizer(changed(tokenizer=cut)).encode("x" * 50)) == 50


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_that_is_not_known_is_refused(changed, decoder):
    path = changed(tokenizer=lambda content: content.update(decoder=decoder))
    with pytest.raises(ValueError, match="decoder"):
        load_tokenizer(path)


def test_a_broken_or_missing_tokenizer_is_named(changed, tmp_path):
    path = changed()
    (path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=str(path)):
        load_tokenizer(path)
    with pytest.raises(ValueError, match="nothing-here does not exist"):
        load_tokenizer(tmp_path / "nothing-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        load_tokenizer(tmp_path / "empty")


def test_local_files_never_touch_the_network(changed, monkeypatch, tmp_path):
    def grow(content):  # transformers asks the hub about large vocabularies
        vocab = content["model"]["vocab"]
        vocab.update((f"token{i}", i) for i in range(max(vocab.values()) + 1, 100_100))

    def refuse(*args, **kwargs):
        raise AssertionError("a local tokenizer asked for the network")

    folder = changed(tokenizer=grow)
    gguf_file = vocabularies.write_gguf(tmp_path / "a.gguf", **vocabularies.byte_level_vocabulary())
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(folder).vocab_size == 100_100
    assert load_tokenizer(gguf_file).decode(load_tokenizer(gguf_file).encode("a")) == "a"
