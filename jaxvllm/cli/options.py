"""Options that several commands share, and the engine and sampling parameters made of them."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import click

from jaxvllm.config import AttentionBackend, Dtype
from jaxvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.llm import LLM

_SAMPLING_DEFAULTS = SamplingParams()


class _Buckets(click.ParamType):
    name = "N,N,..."

    def convert(self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None):
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 16,64,256.", param, ctx)


_ENGINE_OPTIONS = [  # each is a field of EngineConfig; one that is not given keeps the field's own default
    click.option("--dtype", type=click.Choice(get_args(Dtype)), help="Of weights, activations and cache."),
    click.option("--max-model-len", type=int, help="Most tokens per sequence, prompt and completion."),
    click.option("--max-num-seqs", type=int, help="Most sequences per step."),
    click.option("--max-num-batched-tokens", type=int, help="Most tokens per step."),
    click.option("--kvcache-block-size", type=int, help="Tokens per block of the KV cache."),
    click.option("--num-kvcache-blocks", type=int, help="Blocks in the KV cache; -1 sizes it from memory."),
    click.option("--gpu-memory-utilization", type=float, help="Share of a TPU's or GPU's memory to use."),
    click.option("--tensor-parallel-size", type=int, help="Chips that share the model."),
    click.option("--attention-backend", type=click.Choice(get_args(AttentionBackend)), help="Body of the kernels."),
    click.option("--token-buckets", type=_Buckets(), help="Padded token counts of prefill."),
    click.option("--seq-buckets", type=_Buckets(), help="Padded sequence counts of decode."),
    click.option("--block-buckets", type=_Buckets(), help="Padded blocks per sequence."),
    click.option("--seed", type=int, help="Of the requests that give none."),
    click.option(
        "--enforce-eager/--warm-up",
        default=True,
        help="Compile each step when it is first needed, or all of them at the start.",
    ),
]


def _sampling_options(max_tokens: int) -> list[Callable]:
    defaults = _SAMPLING_DEFAULTS
    return [
        click.option("--temperature", type=float, default=defaults.temperature, help="0 is greedy."),
        click.option("--top-k", type=int, default=defaults.top_k, help="Keep the k most likely tokens; -1: all."),
        click.option("--top-p", type=float, default=defaults.top_p, help="Keep tokens up to this probability."),
        click.option("--min-p", type=float, default=defaults.min_p, help="Keep tokens this likely, next to the best."),
        click.option("--max-tokens", type=int, default=max_tokens, help="Most new tokens."),
        click.option("--min-tokens", type=int, default=defaults.min_tokens, help="No end before this many tokens."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="One more id that ends it."),
        click.option("--ignore-eos", is_flag=True, help="Generate past the model's end ids."),
    ]


_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")


def engine_and_sampling_options(max_tokens: int) -> Callable[[Callable], Callable]:
    """Decorates a command with the options of the engine and of sampling; they arrive as keyword arguments."""

    def decorate(function: Callable) -> Callable:
        for option in reversed([*_sampling_options(max_tokens), *_ENGINE_OPTIONS]):
            function = option(function)
        return function

    return decorate


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    """Returns the engine's options that were given, and the sampling parameters; `ValueError` on a wrong value."""
    sampling = SamplingParams(**{name: options[name] for name in _SAMPLING_NAMES})
    engine = {name: value for name, value in options.items() if name not in _SAMPLING_NAMES and value is not None}
    return engine, sampling


def load_llm(model: str, options: dict[str, Any]) -> "LLM":
    """Loads a model; a progress bar shows where someone watches."""
    from jaxvllm.llm import LLM

    return LLM(model, use_tqdm=sys.stderr.isatty(), **options)
