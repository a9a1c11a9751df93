"""Builds a tokenizer from the metadata of a GGUF file, with the `tokenizers` library.

Two kinds of vocabulary are known: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how text is split before
merging) and "llama" (SentencePiece BPE: in place of merges a score per token, and a token for every byte).
"""

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxvllm.models.checkpoint.gguf import GGUFFile
from jaxvllm.models.config import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What tokenizer.ggml.token_type says of a token
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "\u2581"  # SentencePiece's visible space

# How each family of models splits text before merging, as its own tokenizer.json has it: the merges were
# learned on exactly these pieces.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """A split that also cuts where a small letter is followed by a capital; a word may have an `ending`."""
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{ending}" for a, b in ("*+", "+*"))
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_SPLITS = {  # name in tokenizer.ggml.pre -> patterns, applied one after the other
    "gpt-2": [_GPT2_SPLIT],
    "smollm": [r"\p{N}", _GPT2_SPLIT],
    "llama-bpe": [_LLAMA3_SPLIT],
    "llama3": [_LLAMA3_SPLIT],
    "llama-v3": [_LLAMA3_SPLIT],
    "qwen2": [_QWEN2_SPLIT],
    "deepseek-r1-qwen": [_QWEN2_SPLIT],
    "smaug-bpe": [_LLAMA3_SPLIT],  # SmolLM3's
    "dbrx": [_LLAMA3_SPLIT],  # OLMo 2's
    "gpt-4o": [_cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")],  # Phi-4-mini's
    "tekken": [_cased("", r"\p{N}")],  # Mistral Nemo's
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a piece that is a token is not built from merges
_BEGINS_BY_DEFAULT = _WHOLE_WORDS_FIRST  # files that do not say so still start every text with bos
_NORMALIZES = ("qwen2",)  # to NFC, as Qwen's own tokenizer.json does


def load_gguf_tokenizer(file: GGUFFile) -> tuple["PreTrainedTokenizerFast", frozenset[int]]:
    """Returns the tokenizer of a GGUF file and the ids that end a text.

    Raises `ValueError` naming the file when its vocabulary is missing, contradicts itself or is not known.
    """
    try:
        return _Builder(file.metadata).build()
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{file.path}: its tokenizer cannot be built: {error}") from error


class _Builder:
    """What the file says of its vocabulary, and the tokenizer made of it."""

    def __init__(self, metadata: dict[str, Any]):
        self.metadata = metadata
        self.model = self._field("model", str)
        if self.model not in ("gpt2", "llama"):
            raise ValueError(f"tokenizer.ggml.model {self.model!r} is not supported: gpt2 and llama are.")
        self.tokens: list[str] = self._field("tokens", list)
        self.types: list[int] = self._per_token("token_type", default=_NORMAL)

    def build(self) -> tuple["PreTrainedTokenizerFast", frozenset[int]]:
        backend, begins = self._byte_level() if self.model == "gpt2" else self._sentencepiece()
        self._add_special_tokens(backend)
        self._add_post_processor(backend, begins)
        named = {  # transformers' names for the tokens that chat templates use
            "bos_token": self._special_id("bos"),
            "eos_token": self._special_id("eos"),
            "unk_token": self._special_id("unknown"),
            "pad_token": self._special_id("padding"),
        }
        tokenizer = import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=self.metadata.get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            **{name: self.tokens[i] for name, i in named.items() if i is not None},
        )
        ends = (self._special_id(name) for name in ("eos", "eot", "eom"))  # of a text, a turn, a message
        return tokenizer, frozenset(i for i in ends if i is not None)

    def _field(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {type(value).__name__}"
            raise ValueError(f"tokenizer.ggml.{name} {found}, {kind.__name__} is needed.")
        return value

    def _per_token(self, name: str, default: Any) -> list[Any]:
        values = self._field(name, list, default=[default] * len(self.tokens))
        if len(values) != len(self.tokens):
            raise ValueError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(self.tokens)} tokens.")
        return values

    def _special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.metadata.get(key)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise ValueError(f"{key} {token_id} is outside the vocabulary of {len(self.tokens)} tokens.")
        return token_id

    def _byte_level(self) -> tuple[Backend, bool]:
        """Returns the backend of a "gpt2" vocabulary, and whether texts begin with bos by default."""
        pre = self._field("pre", str, default="default")
        if pre not in _SPLITS:
            known = ", ".join(_SPLITS)
            raise ValueError(f"tokenizer.ggml.pre {pre!r} (how text is split) is not supported: {known} are.")
        backend = Backend(
            models.BPE(
                {token: i for i, token in enumerate(self.tokens) if self.types[i] != _UNUSED},
                [_pair(merge) for merge in self._field("merges", list)],
                ignore_merges=pre in _WHOLE_WORDS_FIRST,
            )
        )
        if pre in _NORMALIZES:
            backend.normalizer = normalizers.NFC()
        splits: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in _SPLITS[pre]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend, pre in _BEGINS_BY_DEFAULT

    def _sentencepiece(self) -> tuple[Backend, bool]:
        """Returns the backend of a "llama" vocabulary, and whether texts begin with bos by default."""
        # A user-defined token is matched in the text as it was written, with real spaces.
        self.tokens = [
            token.replace(_SPACE, " ") if kind == _USER_DEFINED else token
            for token, kind in zip(self.tokens, self.types, strict=True)
        ]
        scores = self._per_token("scores", default=0.0)
        mergeable = {token: scores[i] for i, token in enumerate(self.tokens) if self.types[i] == _NORMAL}
        unknown = self._special_id("unknown")
        backend = Backend(
            models.BPE(
                {token: i for i, token in enumerate(self.tokens) if self.types[i] != _UNUSED},
                _merges_from_scores(mergeable),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        escape: list[Any] = [normalizers.Replace(" ", _SPACE)]
        unescape: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._field("add_space_prefix", bool, default=True):
            escape.insert(0, normalizers.Prepend(_SPACE))
            unescape.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(escape)
        backend.decoder = decoders.Sequence(unescape)
        return backend, True

    def _add_special_tokens(self, backend: Backend):
        """Lets the marked tokens be found whole in a text; decoding leaves control tokens out."""

        def added(*kinds: int, special: bool) -> list[AddedToken]:
            marked = (token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds and token)
            return [
                AddedToken(token, normalized=False, special=special, rstrip=self._takes_spaces(token))
                for token in marked
            ]

        backend.add_special_tokens(added(_CONTROL, _UNKNOWN, special=True))
        backend.add_tokens(added(_USER_DEFINED, special=False))

    def _takes_spaces(self, token: str) -> bool:
        """Whether a marked token swallows the white space after it: Phi-3's do, and no key of the file says so."""
        is_phi3 = self.model == "llama" and self.metadata.get("general.architecture") == "phi3"
        return is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")

    def _add_post_processor(self, backend: Backend, begins: bool):
        bos, eos = self._special_id("bos"), self._special_id("eos")
        before = {"bos": bos} if bos is not None and self._field("add_bos_token", bool, default=begins) else {}
        after = {"eos": eos} if eos is not None and self._field("add_eos_token", bool, default=False) else {}
        if before or after:
            backend.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=[*before.items(), *after.items()]
            )


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right) or " " in right:
        raise ValueError(f"tokenizer.ggml.merges holds {merge!r}, which is not two tokens with a space between.")
    return left, right


def _merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Returns the merges by which BPE does what SentencePiece does: build the best-scored token first.

    `scores` holds the tokens that may be built. Each way to cut one into two others is a merge.
    """
    merges = []
    for token, score in scores.items():
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges.extend((score, left, right) for left, right in cuts if left in scores and right in scores)
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]
