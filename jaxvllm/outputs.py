"""What a request gets back."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The result of one request. `output["text"]` and `output["token_ids"]` work as in NanoVLLM.

    `finish_reason` is "stop" (an end id or a stop id, which is the last of `token_ids`), "length" (max_tokens,
    max_model_len or the cache's size) or "abort".
    """

    request_id: int
    text: str  # completion without special tokens
    token_ids: list[int]  # completion, end id included
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose K and V came from the prefix cache

    def __getitem__(self, name: str):
        if name not in self.__slots__:
            raise KeyError(f"{name!r} is none of {', '.join(self.__slots__)}")
        return getattr(self, name)
