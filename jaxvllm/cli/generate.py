"""`jaxvllm generate`: complete prompts from the command line."""

import dataclasses
import json
import sys
from typing import Any

import click

from jaxvllm.cli.options import engine_and_sampling_options, load_llm, split_options


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt and line.")
@engine_and_sampling_options(max_tokens=64)
def generate(model: str, prompts: tuple[str, ...], as_json: bool, **options: Any):
    """Complete each PROMPT with MODEL: a folder, a .gguf file or a hub name. All prompts run together.

    A prompt "-" is read from standard input.
    """
    engine_options, sampling_params = split_options(options)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    llm = load_llm(model, engine_options)
    outputs = llm.generate(texts, sampling_params, use_tqdm=sys.stderr.isatty())
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            click.echo(json.dumps({"prompt": text, **dataclasses.asdict(output)}, ensure_ascii=False))
        elif len(texts) == 1:
            click.echo(output.text)
        else:
            click.echo(f"{click.style(text, bold=True)}{output.text}\n")
