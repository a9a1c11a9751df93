"""Writes GGUF files that hold a tokenizer and nothing else."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FRAGMENTS = ["In", "we're", "it'll", "DON'T", "x", "ÀÉ", "naïve", "你好", "=", "f(", ",b)", "if", ":", "!!", "."]
_FRAGMENTS += [" ", "  ", "\n", "\n\n", " \n", "\t"]


def write_gguf(path: Path, arch: str = "llama", **fields: Any) -> Path:
    """Writes `tokenizer.ggml.*` fields (`chat_template` too); a field given as None is left out."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in fields.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary() -> dict[str, Any]:
    """Returns the fields of a "gpt2" vocabulary whose merges run across words, digits and spaces alike.

    So a text that is split otherwise than it should be comes out as other ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    rng = random.Random(0)
    lines = ["".join(rng.choice([*_FRAGMENTS, str(rng.randint(0, 9999))]) for _ in range(10)) for _ in range(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [*SPECIAL, *sorted(model["vocab"], key=model["vocab"].__getitem__), "[PAD]"]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [SPECIAL.get(token, UNUSED if token == "[PAD]" else NORMAL) for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "chat_template": CHAT_TEMPLATE,
    }


def sentencepiece_vocabulary(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a "llama" vocabulary from `tests/data/sentencepiece_bpe.json`."""
    return {
        "model": "llama",
        "tokens": record["tokens"],
        "scores": record["scores"],
        "token_type": record["token_types"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
