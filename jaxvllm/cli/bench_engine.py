"""The benchmarks of `jaxvllm bench` that run an engine, or the part of it that needs no device."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from jaxvllm.cli.options import engine_options

_MODEL_OPTIONS = [
    click.option("--model", help="A folder, a .gguf file or a hub name."),
    click.option("--random", help="tiny, small, smollm2-135m, qwen3-0.6b-shaped or a config.json: random weights."),
]


def _check_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuses a file in a folder that is not there before anything is measured, not after."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent} is no folder: make it first.", ctx, param)
    return path


_OUTPUT = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_folder,
    help="Write the JSON line to this file too.",
)


def _with(options: list[Callable]) -> Callable[[Callable], Callable]:
    def decorate(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _print(result: Mapping[str, Any], output: Path | None):
    from jaxvllm.bench.report import show

    text = show(result)
    click.echo(text)
    if output is not None:
        output.write_text(text.splitlines()[-1] + "\n", encoding="utf-8")


@click.command()
@_with(_MODEL_OPTIONS)
@click.option("--workload", default="nano", help="nano, short, single, or a JSONL file of requests.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Timed runs; the median counts.")
@click.option(
    "--against",
    help="hf, llamacpp or vllm on the same token ids, or turns (no async_scheduling): ratio of runs in turns.",
)
@click.option("--peer-python", help="The interpreter of an environment that has the peer.")
@click.option("--profile", help="Write a jax.profiler trace of one more run into this folder.")
@_OUTPUT
@engine_options
def throughput(output: Path | None, **options: Any):
    """All requests at once: tokens per second, where the time goes, and the share of what the machine could do."""
    from jaxvllm.bench.throughput import measure

    own = {name: options.pop(name) for name in ("model", "random", "workload", "repeats")}
    own |= {name: options.pop(name) for name in ("against", "peer_python", "profile")}
    _print(measure(**own, options=options), output)


@click.command()
@_with(_MODEL_OPTIONS)
@click.option("--workload", default="short", help="nano, short, single, or a JSONL file of requests.")
@click.option("--rate", default=1.0, help="Requests that arrive per second, at random.")
@_OUTPUT
@engine_options
def latency(output: Path | None, **options: Any):
    """Requests that arrive over time: percentiles of the time to the first token, and per token after it."""
    from jaxvllm.bench.latency import measure

    own = {name: options.pop(name) for name in ("model", "random", "workload", "rate")}
    _print(measure(**own, options=options), output)


@click.command()
@_with(_MODEL_OPTIONS)
@click.option("--requests", "num_requests", default=64, help="Requests that begin alike.")
@click.option("--shared", default=1024, help="Tokens that they share.")
@click.option("--length", default=1152, help="Tokens of each prompt.")
@click.option("--max-tokens", default=8, help="New tokens of each.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, help="Timed runs with and without the cache, in turns."
)
@_OUTPUT
@engine_options
def prefix(output: Path | None, **options: Any):
    """Requests with a common beginning, with the prefix cache and without it: hit rate, saved work, ratio."""
    from jaxvllm.bench.prefix import measure

    names = ("model", "random", "num_requests", "shared", "length", "max_tokens", "repeats")
    own = {name: options.pop(name) for name in names}
    _print(measure(**own, options=options), output)


@click.command()
@_with(_MODEL_OPTIONS)
@_OUTPUT
@engine_options
def start(output: Path | None, **options: Any):
    """From a new process to the first token, with an empty compilation cache and with a full one."""
    from jaxvllm.bench.start import measure

    own = {name: options.pop(name) for name in ("model", "random")}
    _print(measure(**own, options=options), output)


@click.command()
@click.option("--blocks", default=1_000_000, help="Blocks in the pool.")
@click.option("--seqs", default=4096, help="Running sequences.")
@_OUTPUT
def metadata(output: Path | None, blocks: int, seqs: int):
    """The scheduler and the block manager alone, no device: cost per operation, in a small pool and in a large one."""
    from jaxvllm.bench.machine import describe
    from jaxvllm.bench.metadata import measure

    _print({"benchmark": "metadata", **measure(blocks, seqs), "machine": describe()}, output)


@click.command()
@click.option("--dtype", default="float32", help="Of queries, keys and values.")
@_OUTPUT
def attention(output: Path | None, dtype: str):
    """Decode attention alone, over 8 sequences of 1,024 tokens: its share of the copy bandwidth."""
    from jaxvllm.bench.attention import measure

    _print(measure(dtype), output)


COMMANDS = (throughput, latency, prefix, start, metadata, attention)
