"""Options that several commands share, and the engine and sampling parameters made of them."""

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from jaxvllm.config import DEFAULTS, AttentionBackend, Dtype, Quantization, read_preset
from jaxvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxvllm.llm import LLM

_SAMPLING_DEFAULTS = SamplingParams()


class _Buckets(click.ParamType):
    name = "N,N,..."

    def convert(
        self, value: str | list[int] | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ):
        if not isinstance(value, str):  # the default, or a preset's
            return tuple(value)
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 16,64,256.", param, ctx)


def engine_option(name: str, kind: click.ParamType | type, text: str) -> Callable:
    """An option for a field of `EngineConfig`, with the field's default."""
    return click.option(name, type=kind, help=text, default=DEFAULTS[name[2:].replace("-", "_")])


def _use_preset(ctx: click.Context, _: click.Parameter, path: Path | None):
    """Makes a preset's values the defaults; what is given on the command line still wins."""
    if path is not None:
        ctx.default_map = read_preset(path)


_ENGINE_OPTIONS = [
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_use_preset,
        help="A TOML file of engine options, such as those in configs/; options given beside it win.",
    ),
    engine_option("--dtype", click.Choice(get_args(Dtype)), "Of weights, activations and cache."),
    engine_option("--quantization", click.Choice(get_args(Quantization)), "Of the layers' weights."),
    engine_option("--max-model-len", int, "Most tokens per sequence, prompt and completion."),
    engine_option("--max-num-seqs", int, "Most sequences per step."),
    engine_option("--max-num-batched-tokens", int, "Most tokens per step."),
    engine_option("--kvcache-block-size", int, "Tokens per block of the KV cache."),
    engine_option("--num-kvcache-blocks", int, "Blocks in the KV cache; -1 sizes it from memory."),
    engine_option("--gpu-memory-utilization", float, "Share of a TPU's or GPU's memory to use."),
    engine_option("--tensor-parallel-size", int, "Chips that share the model."),
    engine_option("--attention-backend", click.Choice(get_args(AttentionBackend)), "Body of the kernels."),
    engine_option("--token-buckets", _Buckets(), "Padded token counts of prefill; none: automatic."),
    engine_option("--seq-buckets", _Buckets(), "Padded sequence counts of decode; none: automatic."),
    engine_option("--block-buckets", _Buckets(), "Padded blocks per sequence; none: automatic."),
    engine_option("--seed", int, "Of the requests that give none."),
    engine_option("--async-scheduling", bool, "Schedule and dispatch a step while the device runs the one before."),
    engine_option("--forbid-recompile", bool, "Fail when a step compiles after the warm-up."),
    click.option(
        "--enforce-eager/--warm-up",
        default=DEFAULTS["enforce_eager"],
        help="Compile each step when it is first needed, or all of them at the start (default).",
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


_SAMPLING_NAMES = {field.name for field in fields(SamplingParams)} - {"seed"}  # `--seed` is the engine's


def engine_options(function: Callable) -> Callable:
    """Decorates a command with the options of the engine; they arrive as keyword arguments."""
    for option in reversed(_ENGINE_OPTIONS):
        function = option(function)
    return function


def engine_and_sampling_options(max_tokens: int) -> Callable[[Callable], Callable]:
    """Decorates a command with the options of the engine and of sampling; they arrive as keyword arguments."""

    def decorate(function: Callable) -> Callable:
        for option in reversed([*_sampling_options(max_tokens), *_ENGINE_OPTIONS]):
            function = option(function)
        return function

    return decorate


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    """Returns the engine's options and the sampling parameters; `ValueError` on a wrong value."""
    sampling = SamplingParams(**{name: options[name] for name in _SAMPLING_NAMES})
    engine = {name: value for name, value in options.items() if name not in _SAMPLING_NAMES}
    return engine, sampling


def load_llm(model: str, options: dict[str, Any]) -> "LLM":
    """Loads a model; a progress bar shows where someone watches."""
    from jaxvllm.llm import LLM

    return LLM(model, use_tqdm=sys.stderr.isatty(), **options)
