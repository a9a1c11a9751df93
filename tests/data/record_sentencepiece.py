"""Records sentencepiece_bpe.json: a small SentencePiece vocabulary, and what sentencepiece itself makes of texts.

Run by hand, in an environment with sentencepiece 0.2.3: python tests/data/record_sentencepiece.py
"""

import json
import random
import tempfile
from pathlib import Path

import sentencepiece  # pyright: ignore[reportMissingImports]  # needed for recording only

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # tokenizer.ggml.token_type
WORDS = (  # noqa: SIM905  # a list of its own line each would fill two pages
    "the of and to in is you that it he was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now"
).split()
TEXTS = ["", "a", " ", "the water", "Hello, world!", " leading", "trailing ", "  two  three   spaces    four     five"]
TEXTS += ["12345 6.78", "naïve café für größe", "你好 👍🏽", "if the_of(123):\n    pass\n\treturn\n", "there there"]
TEXTS += ["<0x41> x", "thethethethe", "x\x00y", "\u2581", "  \u2581 ", "\u00a0 \u3000"]
FRAGMENTS = ["the", "he", " ", "  ", "   ", "when", "if", "_", "(", "123", "4", "\n", "\t", "é", "好", "👍", "a", "th"]
FRAGMENTS += ["ere", "re", "\u00a0", "--", "x", "Z", "ll", "l", "\u2581"]


def training_lines() -> list[str]:
    random.seed(0)
    lines = []
    for i in range(3000):
        line = " ".join(random.choices(WORDS, k=random.randint(3, 12)))
        if i % 5 == 0:
            line = line.capitalize() + "."
        elif i % 11 == 0:
            line = "    " * random.randint(1, 3) + f"if {line.replace(' ', '_')}({random.randint(0, 99999)}):"
        elif i % 17 == 0:
            line = f"naïve café {line} für größe"
        elif i % 19 == 0:
            line = f"{line}  --  {line[::-1]}"
        lines.append(line)
    return lines


def train(folder: Path) -> sentencepiece.SentencePieceProcessor:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_lines()),
        model_prefix=str(folder / "small"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        character_coverage=0.9995,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "small.model"))


def token_type(model: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if model.is_unknown(token_id):
        return UNKNOWN
    if model.is_control(token_id):
        return CONTROL
    return BYTE if model.is_byte(token_id) else NORMAL


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = train(Path(folder))
    ids = range(model.vocab_size())
    texts = TEXTS + ["".join(random.choices(FRAGMENTS, k=random.randint(1, 14))) for _ in range(200)]
    record = {
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_types": [token_type(model, i) for i in ids],
        "encodings": [[text, model.encode(text)] for text in texts],
    }
    path = Path(__file__).with_name("sentencepiece_bpe.json")
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
