"""Byte-level BPE as its definition says, slowly: the truth that `tokenizers` is compared with.

The splits are written with the `regex` module from their published descriptions, the byte alphabet is transformers'.
"""

from itertools import pairwise

import regex
from transformers.convert_slow_tokenizer import bytes_to_unicode

_ALPHABET = bytes_to_unicode()
_GPT2 = [
    r"'(?:s|t|re|ve|m|ll|d)",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r" ?[^\p{White_Space}\p{L}\p{N}]+",
    r"\p{White_Space}+(?!\P{White_Space})",
    r"\p{White_Space}+",
]


def _modern(digits: str) -> list[str]:
    return [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        digits,
        r" ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*",
        r"\p{White_Space}*[\r\n]+",
        r"\p{White_Space}+(?!\P{White_Space})",
        r"\p{White_Space}+",
    ]


_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> list[str]:
    return [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{ending}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{ending}",
        digits,
        r" ?[^\p{White_Space}\p{L}\p{N}]+[\r\n/]*",
        *_modern(digits)[-3:],
    ]


SPLITS = {  # one list of alternatives per pass over the pieces
    "gpt-2": [_GPT2],
    "smollm": [[r"\p{N}"], _GPT2],
    "llama-bpe": [_modern(r"\p{N}{1,3}")],
    "qwen2": [_modern(r"\p{N}")],
    "gpt-4o": [_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")],
    "tekken": [_cased("", r"\p{N}")],
    "default": [[r"[\p{P}$+<=>^~|]+"], _GPT2, [r"\p{N}+"], [r"[0-9][0-9][0-9]"]],
}


def split(text: str, pre: str) -> list[str]:
    """Returns the pieces of a text; what no alternative matches is a piece too."""
    pieces = [text]
    for alternatives in SPLITS[pre]:
        pattern = regex.compile("|".join(alternatives))
        pieces = [part for piece in pieces for part in _cut(piece, pattern)]
    return pieces


def encode(text: str, pre: str, tokens: list[str], merges: list[str]) -> list[int]:
    """Returns the ids of a text without special tokens."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    encoded = []
    for piece in split(text, pre):
        symbols = [_ALPHABET[byte] for byte in piece.encode()]
        if pre in ("llama-bpe", "tekken") and "".join(symbols) in ids:
            symbols = ["".join(symbols)]
        encoded += [ids[symbol] for symbol in _merge(symbols, ranks)]
    return encoded


def _cut(text: str, pattern: regex.Pattern[str]) -> list[str]:
    parts, end = [], 0
    for match in pattern.finditer(text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


def _merge(symbols: list[str], ranks: dict[tuple[str, ...], int]) -> list[str]:
    while pairs := [pair for pair in pairwise(symbols) if pair in ranks]:
        best = min(pairs, key=ranks.__getitem__)
        merged, i = [], 0
        while i < len(symbols):
            joined = tuple(symbols[i : i + 2]) == best
            merged.append("".join(best) if joined else symbols[i])
            i += 2 if joined else 1
        symbols = merged
    return symbols
