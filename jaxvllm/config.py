"""Every limit of an engine, checked once."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from jaxvllm.options import is_int, is_number, python_scalar, refuse_unknown_names, store_python_scalars

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "int8"]
AttentionBackend = Literal["auto", "xla", "tpu", "gpu"]

PRESETS = Path(__file__).parent / "configs"

_SMALLEST_TOKEN_BUCKET = 16


@refuse_unknown_names("option")
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The options of `LLM(model, ...)`, under NanoVLLM's names where NanoVLLM has them.

    Raises `ValueError` on a value outside its range and on an unknown name. Nothing changes after construction: what
    depends on the checkpoint or the device (`eos`, `num_kvcache_blocks`, `max_model_len`) is settled with
    `dataclasses.replace`.
    """

    model: str  # folder, GGUF file or hub name
    max_num_batched_tokens: int = 8192  # tokens per step
    max_num_seqs: int = 256  # sequences per step
    max_model_len: int = 4096  # tokens per sequence, prompt and completion; cut to what the model was made for
    gpu_memory_utilization: float = 0.9  # share of a TPU's or GPU's memory for weights, cache and temporaries
    tensor_parallel_size: int = 1  # chips that share the model
    enforce_eager: bool = False  # skip the warm-up: programs compile when first needed
    kvcache_block_size: int = 16  # tokens per KV-cache block
    num_kvcache_blocks: int = -1  # blocks in the pool; -1 sizes it from the device's memory
    eos: int | frozenset[int] = -1  # end ids; the engine fills in those of the checkpoint
    dtype: Dtype = "auto"  # of weights, activations and cache; auto is the checkpoint's
    quantization: Quantization = "auto"  # of the layers' weights; int8 is per output channel, auto the checkpoint's
    attention_backend: AttentionBackend = "auto"  # auto follows the platform
    token_buckets: tuple[
        int, ...
    ] = ()  # padded token counts of prefill; () doubles from 16 to the limit, at most 512 on a CPU
    seq_buckets: tuple[int, ...] = ()  # padded sequence counts of decode; () doubles from 1 to the limit
    block_buckets: tuple[int, ...] = ()  # padded blocks per sequence; () is one bucket, of max_model_len
    async_scheduling: bool = True  # schedule and dispatch a step while the device still runs the one before
    forbid_recompile: bool = False  # raise when a step compiles after the warm-up
    seed: int = 0  # of the requests that give none

    def __post_init__(self):
        store_python_scalars(self)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r}: give a folder, a .gguf file or a hub name.")
        for field in ("token_buckets", "seq_buckets", "block_buckets"):
            object.__setattr__(self, field, _collected(field, getattr(self, field), tuple))
        if not isinstance(self.eos, int):
            object.__setattr__(self, "eos", _collected("eos", self.eos, frozenset))
        self._check_counts()
        self._check_choices()
        self._check_buckets()

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.kvcache_block_size)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end ids as a set; empty where there is none."""
        return frozenset({self.eos} - {-1}) if isinstance(self.eos, int) else self.eos

    def resolved_token_buckets(self, limit: int | None = None) -> tuple[int, ...]:
        """The padded token counts of prefill; where the user gave none, none above `limit`."""
        most = min(self.max_num_batched_tokens, limit or self.max_num_batched_tokens)
        return self.token_buckets or _doubling(_SMALLEST_TOKEN_BUCKET, most)

    def resolved_seq_buckets(self) -> tuple[int, ...]:
        return self.seq_buckets or _doubling(1, self.max_num_seqs)

    def resolved_block_buckets(self) -> tuple[int, ...]:
        return self.block_buckets or (self.max_blocks_per_seq,)

    def _check_counts(self):
        minima = {
            "max_num_batched_tokens": 1,
            "max_num_seqs": 1,
            "max_model_len": 2,  # one token of prompt, one of completion
            "tensor_parallel_size": 1,
            "kvcache_block_size": 2,  # NanoVLLM's rule for a new block (length % block_size == 1) breaks at 1
        }
        for name, least in minima.items():
            value = getattr(self, name)
            if not is_int(value) or value < least:
                raise ValueError(f"{name}={value!r} is not a whole number of at least {least}.")
        blocks = self.num_kvcache_blocks
        if not is_int(blocks) or (blocks < 1 and blocks != -1):
            raise ValueError(f"num_kvcache_blocks={blocks!r} is not a positive number: use -1 for automatic.")
        share = self.gpu_memory_utilization
        if not is_number(share) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={share!r} is not a number in (0, 1].")
        if not is_int(self.seed) or self.seed < 0:
            raise ValueError(f"seed={self.seed!r} is not a whole number of at least 0.")
        if any(not is_int(end_id) or end_id < 0 for end_id in self.eos_ids):
            raise ValueError(f"eos={self.eos!r} is not a token id or a set of them.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a decode step needs one token per sequence."
            )

    def _check_choices(self):
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("quantization", self.quantization, get_args(Quantization))
        _check_choice("attention_backend", self.attention_backend, get_args(AttentionBackend))
        for name in ("enforce_eager", "async_scheduling", "forbid_recompile"):
            _check_choice(name, getattr(self, name), (False, True))

    def _check_buckets(self):
        limits = {
            "token_buckets": ("max_num_batched_tokens", self.max_num_batched_tokens),
            "seq_buckets": ("max_num_seqs", self.max_num_seqs),
            "block_buckets": ("max_model_len / kvcache_block_size", self.max_blocks_per_seq),
        }
        for name, (limit_name, limit) in limits.items():
            buckets = getattr(self, name)
            if any(not is_int(b) or b < 1 for b in buckets) or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name}={buckets} is not a rising sequence of positive whole numbers.")
            if buckets and buckets[-1] < limit:
                raise ValueError(
                    f"{name}={buckets} ends below {limit_name}={limit}: add {limit}, or lower {limit_name}."
                )


DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}

_OF_THE_MODEL = {"model", "eos"}


def read_preset(path: Path) -> dict[str, Any]:
    """Reads options from a TOML file such as those in `configs`. Raises `ValueError` naming the file.

    A preset is valid by itself, and may not contain `model` or `eos`.
    """
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
        for name in _OF_THE_MODEL & options.keys():
            raise ValueError(f"{name!r} cannot be part of a preset: it comes from the command line or the checkpoint.")
        EngineConfig(model="any", **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"preset {path}: {error}") from error
    return options


def _collected(name: str, values: Any, kind: type) -> Any:
    try:
        if isinstance(values, str):
            raise TypeError
        return kind(map(python_scalar, values))
    except TypeError:
        raise ValueError(f"{name}={values!r} is not a list of whole numbers.") from None


def _check_choice(name: str, value: object, choices: Collection[object]):
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, choices))}.")


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """Powers of two times `first` below `last`, then `last` (at least `first`)."""
    buckets = [first]
    while buckets[-1] < last:
        buckets.append(min(2 * buckets[-1], last))
    return tuple(buckets)
