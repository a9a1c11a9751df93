"""`jaxvllm demo`: a small real model answers a question."""

from time import perf_counter
from typing import TYPE_CHECKING

import click

from jaxvllm.cli.options import load_llm
from jaxvllm.config import PRESETS, read_preset

if TYPE_CHECKING:
    from jaxvllm.engine.stats import EngineStats

QUESTION = "List three primary colours."
_PRESET = PRESETS / "smollm2_demo.toml"  # one question: two programs, a prefill of 64 tokens and a decode step
_MAX_TOKENS = 128


@click.command()
@click.argument("question", default=QUESTION)
def demo(question: str):
    """Fetch SmolLM2-135M-Instruct (98 MB, once), ask it QUESTION and print its answer with the engine's speed."""
    from jaxvllm.demo import demo_model_path

    path = demo_model_path()
    start = perf_counter()
    click.echo(f"Loading {path.name} ...", err=True)

    from jaxvllm.sampling_params import SamplingParams

    llm = load_llm(str(path), read_preset(_PRESET))
    ready_s = perf_counter() - start
    token_ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    click.echo(f"> {question}")
    first_token_s = None
    for text in llm.stream(token_ids, SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)):
        first_token_s = first_token_s or perf_counter() - start
        click.echo(text, nl=False)
    click.echo("\n")
    _print_figures(llm.stats, ready_s, first_token_s or perf_counter() - start)


def _print_figures(stats: "EngineStats", ready_s: float, first_token_s: float):
    """Prints the figures to compare a second run with: by then the programs come from the cache on disk."""
    compiled = stats.compiled
    click.echo(
        f"throughput: prefill {stats.num_prompt_tokens} tokens at {stats.prefill_tokens_per_s:.1f} tokens/s, "
        f"decode {stats.num_decode_tokens} tokens at {stats.decode_tokens_per_s:.1f} tokens/s"
    )
    click.echo(
        f"start-up: ready after {ready_s:.1f} s, first text after {first_token_s:.1f} s; "
        f"{compiled.num_compiled} programs compiled, {compiled.num_cache_hits} taken from the cache, "
        f"{compiled.compile_s:.1f} s"
    )
