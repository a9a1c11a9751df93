"""What one request asks of the sampler."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from jaxvllm.options import is_int, is_number, python_scalar, refuse_unknown_names, store_python_scalars

_SEED_LIMIT = 2**64
_TOP_K_LIMIT = 2**31
_TEMPERATURE_LIMIT = 1e30  # float32 on the device ends at 3e38


@refuse_unknown_names("sampling parameter")
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Filters apply in the order temperature, top_k, top_p, min_p. `temperature=0` takes the most likely token
    and ignores the filters. Raises `ValueError` on a value outside its range and on an
    unknown name.
    """

    temperature: float = 1.0  # 0 is greedy
    max_tokens: int = 64  # new tokens at most
    ignore_eos: bool = False  # generate past the model's end ids
    _: KW_ONLY  # the three above keep NanoVLLM's order, for scripts that pass them by position
    top_k: int = -1  # keep the k most likely tokens; -1 or 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens whose probabilities reach top_p
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    min_tokens: int = 0  # no end id or stop id before this many new tokens
    stop_token_ids: Sequence[int] = ()  # end the request beside the model's own end ids, ignore_eos or not
    seed: int | None = None  # None: derived from the engine's seed and the request's number

    def __post_init__(self):
        store_python_scalars(self)
        try:
            object.__setattr__(self, "stop_token_ids", tuple(map(python_scalar, self.stop_token_ids)))
        except TypeError:
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} is not a list of token ids.") from None
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be True or False.")
        for field in ("temperature", "top_p", "min_p"):
            value = getattr(self, field)
            if not is_number(value) or not math.isfinite(value):
                raise ValueError(f"{field}={value!r} is not a finite number.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative: use 0 for greedy decoding.")
        if self.temperature > _TEMPERATURE_LIMIT:
            raise ValueError(
                f"temperature={self.temperature} is above {_TEMPERATURE_LIMIT:.0e}: no token would be likelier."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]: use 1 to keep every token.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is outside [0, 1]: use 0 to keep every token.")
        if not is_int(self.top_k) or not -1 <= self.top_k < _TOP_K_LIMIT:
            raise ValueError(f"top_k={self.top_k!r} is not a count below 2**31: use -1 to keep every token.")
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(
                f"max_tokens={self.max_tokens!r} is not a whole number of at least 1: a request generates something."
            )
        if not is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens!r} is outside 0 to max_tokens={self.max_tokens}.")
        if any(not is_int(token_id) or token_id < 0 for token_id in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} holds something that is not a token id.")
        if self.seed is not None and (not is_int(self.seed) or not 0 <= self.seed < _SEED_LIMIT):
            raise ValueError(f"seed={self.seed!r} is outside 0 to 2**64 - 1: give None for one from the engine.")
