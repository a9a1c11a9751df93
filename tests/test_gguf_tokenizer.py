"""Tokenizers built from GGUF metadata encode as the models' own do."""

import json
import unicodedata
from pathlib import Path

import gguf_vocabularies as vocabularies
import pytest
import reference_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.demo import demo_model_path
from jaxvllm.models.checkpoint.gguf import GGUFFile
from jaxvllm.tokenizer import load_tokenizer

# Characters that Unicode has assigned: the libraries' tables are of different years.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn"]))
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "'s",
            "'LL",
            "n't",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "12",
            "3456",
            "²",
            "x",
            "É",
            "你",
            "👍🏽",
            "!!",
            "_=",
            "\u00a0",
        ]
    )
).map("".join)
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\n\n\n\ttabs \r\n end  ",
    "1984 12 1234567 3.14159 ٣٤ ²½Ⅷ x1y2",
    "we're DON'T it'll I'm 's",
    "def f(a,b):\n    if  a!=b:\n        return {'x': [1,2]}  # ok\n",
    "naïve ÀÉ Größe 你好。世界 こんにちは नमस्ते שלום",
    "👍🏽👨‍👩‍👧 \u200b\ufeff\u00a0\u3000 e\u0301",
    "a" * 300,
    "\x00\x1f\x7f",
]


@pytest.fixture(scope="module")
def vocabulary():
    return vocabularies.byte_level_vocabulary()


@pytest.fixture(scope="module")
def tokenizers(vocabulary, tmp_path_factory):
    """A tokenizer for each kind of split."""
    folder = tmp_path_factory.mktemp("pre")
    return {
        pre: load_tokenizer(
            vocabularies.write_gguf(folder / f"{pre}.gguf", **vocabulary | {"pre": pre}, add_bos_token=False)
        )
        for pre in reference_bpe.SPLITS
    }


@pytest.fixture(scope="module")
def sentencepiece_record():
    path = Path(__file__).parent / "data" / "sentencepiece_bpe.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(sentencepiece_record, tmp_path_factory):
    fields = vocabularies.sentencepiece_vocabulary(sentencepiece_record)
    return load_tokenizer(vocabularies.write_gguf(tmp_path_factory.mktemp("spm") / "spm.gguf", **fields))


def expected_ids(text, pre, vocabulary):
    if pre == "qwen2":
        text = unicodedata.normalize("NFC", text)
    return reference_bpe.encode(text, pre, vocabulary["tokens"], vocabulary["merges"])


@pytest.mark.parametrize("pre", reference_bpe.SPLITS)
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_encoding_follows_the_definition(pre, text, tokenizers, vocabulary):
    assert tokenizers[pre].encode(text) == expected_ids(text, pre, vocabulary)


@pytest.mark.parametrize("pre", reference_bpe.SPLITS)
@given(text=TEXT | FRAGMENTS)
@settings(max_examples=100, deadline=None)
def test_byte_level_encoding_follows_the_definition_for_any_text(pre, text, tokenizers, vocabulary):
    assert tokenizers[pre].encode(text) == expected_ids(text, pre, vocabulary)


def test_the_splits_can_be_told_apart(tokenizers):
    texts = ["In 1984 we're 12 of 1234", "f( ,b)x = DON'T if: !!", "x\n\n  x", "ifInDON'Tx"]
    encodings = {tuple(tuple(tokenizer.encode(text)) for text in texts) for tokenizer in tokenizers.values()}
    assert len(encodings) == len(tokenizers)


@pytest.mark.parametrize("pre", ["smaug-bpe", "dbrx"])
def test_some_split_as_llama_3_and_begin_with_nothing(pre, vocabulary, tokenizers, tmp_path):
    tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "a.gguf", **vocabulary | {"pre": pre}))
    for text in TEXTS:
        assert tokenizer.encode(text) == tokenizers["llama-bpe"].encode(text)


@pytest.mark.parametrize(("arch", "swallowed"), [("phi3", True), ("llama", False)])
def test_phi_3_drops_the_space_after_its_marked_tokens(arch, swallowed, sentencepiece_record, tmp_path):
    fields = vocabularies.sentencepiece_vocabulary(sentencepiece_record)
    marked = {"tokens": [*fields["tokens"], "<|user|>"], "scores": [*fields["scores"], 0.0]}
    fields |= marked | {"token_type": [*fields["token_type"], vocabularies.CONTROL]}
    tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "a.gguf", arch, **fields))
    same = tokenizer.encode("<|user|>\n  <|user|>") == tokenizer.encode("<|user|><|user|>")
    assert same == swallowed


def test_smollm_encodes_every_digit_on_its_own(tokenizers):
    tokenizer = tokenizers["smollm"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert len(tokenizers["gpt-2"].encode("1234")) < 4


@pytest.mark.parametrize(("pre", "num_tokens"), [("llama-bpe", 1), ("qwen2", 3)])
def test_llama_takes_a_word_that_is_a_token_before_merging(vocabulary, tmp_path, pre, num_tokens):
    unmerged = {
        "tokens": [*vocabulary["tokens"], "zqk"],
        "token_type": [*vocabulary["token_type"], vocabularies.NORMAL],
    }
    path = vocabularies.write_gguf(tmp_path / "a.gguf", **vocabulary | unmerged | {"pre": pre}, add_bos_token=False)
    assert len(load_tokenizer(path).encode("zqk")) == num_tokens


def test_sentencepiece_encoding_is_that_of_sentencepiece(sentencepiece_record, sentencepiece_tokenizer):
    for text, ids in sentencepiece_record["encodings"]:
        assert sentencepiece_tokenizer.encode(text) == [1, *ids], repr(text)  # a text begins with bos


@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_sentencepiece_round_trip_of_any_text(text, sentencepiece_tokenizer):
    # U+2581 is how SentencePiece writes a space
    assert sentencepiece_tokenizer.decode(sentencepiece_tokenizer.encode(text)) == text.replace("\u2581", " ")


def test_special_tokens_are_found_whole_and_left_out_of_text(tokenizers, vocabulary):
    tokenizer = tokenizers["smollm"]
    ids = tokenizer.encode("<|im_start|>x<think>y<|im_end|>")
    x, y = (vocabulary["tokens"].index(char) for char in "xy")
    assert ids == [1, x, 3, y, 2]
    assert tokenizer.decode(ids) == "x<think>y"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>x<think>y<|im_end|>"


def test_unused_tokens_are_never_encoded(tokenizers, vocabulary):
    tokenizer = tokenizers["llama-bpe"]
    unused = vocabulary["tokens"].index("[PAD]")
    assert unused not in tokenizer.encode("[PAD]")
    assert tokenizer.decode([unused]) == ""


def test_end_ids_are_those_of_text_turn_and_message(vocabulary, tmp_path):
    path = vocabularies.write_gguf(tmp_path / "a.gguf", **vocabulary, eot_token_id=0, eom_token_id=5)
    assert load_tokenizer(path).eos_token_ids == {0, 2, 5}


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [
        ({}, [], []),
        ({"pre": "llama-bpe"}, [1], []),  # by default
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(vocabulary, tmp_path, flags, first, last):
    tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "a.gguf", **vocabulary | flags))
    x = vocabulary["tokens"].index("x")
    assert tokenizer.encode("x") == [*first, x, *last]
    rendered = tokenizer.apply_chat_template([{"role": "x", "content": "x"}], add_generation_prompt=False)
    assert rendered[:2] == [1, x]  # the template writes the special tokens, and no others come


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "bloom"}, "'bloom'.*not supported"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b", "ab"]}, "'ab', which is not two tokens"),
        ({"merges": ["zzz yyy"]}, "zzz"),
        ({"token_type": [1, 2]}, "2 entries for"),
        ({"eos_token_id": 10**6}, "eos_token_id 1000000 is outside"),
        ({"model": "llama", "scores": [0.5]}, "1 entries for"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused_by_name(vocabulary, tmp_path, change, message):
    path = vocabularies.write_gguf(tmp_path / "bad.gguf", **vocabulary | change)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_cut_short_is_named(vocabulary, tmp_path):
    path = vocabularies.write_gguf(tmp_path / "short.gguf", **vocabulary)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"short\.gguf"):
        load_tokenizer(path)


@pytest.mark.slow
def test_smollm2_encodes_as_defined():
    path = demo_model_path()
    metadata = GGUFFile(path).metadata
    tokenizer = load_tokenizer(path)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    code = Path(reference_bpe.__file__).read_text(encoding="utf-8")
    for text in [*TEXTS, code]:
        ids = tokenizer.encode(text)
        assert ids == reference_bpe.encode(text, "smollm", tokens, merges)
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {2}
    question = tokenizer.apply_chat_template([{"role": "user", "content": "List three primary colours."}])
    assert tokenizer.decode(question, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nList three primary colours.<|im_end|>\n<|im_start|>assistant\n"
    )
