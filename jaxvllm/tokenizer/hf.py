"""Text to token ids and back, for Hugging Face folders and GGUF files."""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.models.checkpoint.gguf import GGUFFile
from jaxvllm.models.checkpoint.loader import Checkpoint, open_checkpoint
from jaxvllm.models.config import import_transformers
from jaxvllm.tokenizer.gguf import load_gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(source: Path | Checkpoint) -> "Tokenizer":
    """Returns the tokenizer of a checkpoint: a Hugging Face folder or a GGUF file. Never touches the network.

    A GGUF file takes seconds to open: give the open one where there is one. Raises `ValueError` naming the path when
    it holds no tokenizer that can be read and is supported, or nothing is there.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    name = str(checkpoint.path)
    if isinstance(checkpoint, GGUFFile):
        tokenizer, eos_token_ids = load_gguf_tokenizer(checkpoint)
        return Tokenizer(tokenizer, name=name, eos_token_ids=eos_token_ids)
    return Tokenizer(_load_folder(checkpoint.path), name=name)


class Tokenizer:
    """Encodes and decodes text for one model.

    Decoding joins the bytes of the tokens and reads them as UTF-8: what is not UTF-8 becomes U+FFFD. An id
    beyond the vocabulary decodes to nothing: a model's embedding may have more rows than its tokenizer has ids.
    """

    eos_token_ids: frozenset[int]  # those the tokenizer's own files name
    vocab_size: int  # largest id + 1

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, name: str, eos_token_ids: Iterable[int] = ()):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{name}: {type(tokenizer).__name__} has no fast version: a tokenizer.json is needed.")
        # A tokenizer.json may ask that texts be cut or filled to a length: never wanted here.
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self._tokenizer = tokenizer
        self._backend = backend
        own_eos = backend.token_to_id(tokenizer.eos_token) if tokenizer.eos_token else None
        self.eos_token_ids = frozenset(eos_token_ids) | frozenset([] if own_eos is None else [own_eos])
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = _Decoder.from_backend(backend, name)
        self._drops_first_space = decoder.drops_first_space
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._pieces = [b""] * self.vocab_size
        for token, token_id in vocab.items():
            self._pieces[token_id] = decoder.piece(token, added=token_id in added)

    def save(self, folder: Path):
        """Writes tokenizer.json, its settings and the chat template, for `load_tokenizer` to read."""
        self._tokenizer.save_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a prompt, with the tokens that the model expects around it (such as bos).

        Special tokens spelt out in the text are found. Raises `ValueError` when `text` is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; special tokens are left out unless asked for."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        data = b"".join(detokenizer.take(token_id) for token_id in token_ids)
        return data.decode("utf-8", "replace")

    def check_chat_template(self):
        """Raises `ValueError` when there is no chat template."""
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{self.name} has no chat template: give a plain prompt instead of messages, "
                "or use a checkpoint that was tuned for chat."
            )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the ids of a conversation as the model was taught to read one.

        `messages` are `{"role": ..., "content": ...}`; `add_generation_prompt` opens the assistant's answer.
        Raises `ValueError` when there is no chat template, or the messages are malformed or refused by it.
        """
        self.check_chat_template()
        _check_messages(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"the chat template of {self.name} refuses these messages: {error}") from error
        return self._encode(str(text), add_special_tokens=False)  # the template writes its own

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Returns the bytes of one token inside a text, empty for an id beyond the vocabulary."""
        if not 0 <= token_id < self.vocab_size or (skip_special_tokens and token_id in self._special_ids):
            return b""
        return self._pieces[token_id]

    @property
    def drops_first_space(self) -> bool:
        """Whether a text loses the space it begins with (SentencePiece puts one before every text)."""
        return self._drops_first_space

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"a text is needed, not {type(text).__name__}.")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair has no UTF-8
            raise ValueError("the text holds a lone surrogate, which is not valid Unicode: replace it.") from None


class Detokenizer:
    """Turns a stream of token ids into text as it comes; the work per token does not grow with the text.

    A character of several bytes may span tokens: its first bytes are held back until it is whole. The deltas,
    with that of `flush`, add up to exactly what `Tokenizer.decode` returns for all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now certain, often empty."""
        return self._utf8.decode(self.take(token_id))

    def flush(self) -> str:
        """Ends the text; returns U+FFFD when it ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def take(self, token_id: int) -> bytes:
        """Takes the next token; returns its bytes, less the space that SentencePiece put before the text."""
        data = self._tokenizer.piece(token_id, self._skip_special_tokens)
        if data and self._at_start:
            self._at_start = False
            if self._tokenizer.drops_first_space:
                return data.removeprefix(b" ")
        return data


class _Decoder:
    """What a tokenizer's decoder does to one token, and what it does to the start of the text."""

    def __init__(self, *, byte_level: bool, replacements: list[tuple[str, str]], byte_tokens: bool, drop: bool):
        self._byte_of = _byte_alphabet() if byte_level else None
        self._replacements = replacements
        self._byte_tokens = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if byte_tokens else {}
        self.drops_first_space = drop

    @classmethod
    def from_backend(cls, backend: Any, name: str) -> "_Decoder":
        """Reads the decoder of a `tokenizers.Tokenizer`; `ValueError` for one not made of known steps."""
        steps = _flatten(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        kinds = [step["type"] for step in steps]
        replacements, drop = [], False
        for i, step in enumerate(steps):
            match step:
                case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                    continue
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if "Fuse" in kinds[:i]:
                    drop = True  # after Fuse the text is one piece: only its own first space goes
                case _:
                    raise ValueError(f"{name}: the tokenizer's decoder {step} is not supported.")
        if not steps:
            raise ValueError(f"{name}: the tokenizer has no decoder, so its text cannot be put together.")
        return cls(
            byte_level="ByteLevel" in kinds,
            replacements=replacements,
            byte_tokens="ByteFallback" in kinds,
            drop=drop,
        )

    def piece(self, token: str, *, added: bool) -> bytes:
        """Returns the bytes of a token; an added token stands in the vocabulary as it stands in the text."""
        for old, new in self._replacements:
            token = token.replace(old, new)
        if token in self._byte_tokens:
            return self._byte_tokens[token]
        if self._byte_of is None or added or not all(char in self._byte_of for char in token):
            return token.encode()
        return bytes(self._byte_of[char] for char in token)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte behind each character of a byte-level vocabulary.

    Bytes that print in Latin-1 stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _check_messages(messages: object):
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError('messages must be a list of {"role": ..., "content": ...}, with at least one in it.')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f'message {i} is {type(message).__name__}, not {{"role": ..., "content": ...}}.')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {i} has no text under {key!r}.")


def _load_folder(path: Path) -> "PreTrainedTokenizerBase":
    transformers = import_transformers()

    # AutoTokenizer rebuilds the tokenizer by the class that tokenizer_config.json names, and may lose what
    # tokenizer.json says (SmolLM2's names GPT2Tokenizer, which has no split into digits): take the file itself.
    name = "PreTrainedTokenizerFast" if (path / "tokenizer.json").exists() else "AutoTokenizer"
    try:
        return getattr(transformers, name).from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise ValueError(f"{path}: its tokenizer cannot be loaded: {error}") from error
