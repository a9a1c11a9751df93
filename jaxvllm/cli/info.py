"""`jaxvllm info`: what a model is, what it needs, or why it is refused."""

from typing import TYPE_CHECKING, get_args

import click

from jaxvllm.config import Dtype, Quantization

if TYPE_CHECKING:
    from jaxvllm.aot.info import ModelInfo


@click.command()
@click.argument("model")
@click.option("--chip", "chips", multiple=True, help="v5e, v5p, v6e, tpu7x, a100, h100, h200 or b200; none: all.")
@click.option("--length", default=4096, help="Tokens per sequence, prompt and completion.")
@click.option("--kvcache-block-size", "block_size", default=16, help="Tokens per block of the KV cache.")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="auto", help="Of weights, activations and cache.")
@click.option("--quantization", type=click.Choice(get_args(Quantization)), default="auto", help="Of the layers.")
def info(model: str, chips: tuple[str, ...], length: int, block_size: int, dtype: str, quantization: str):
    """Describe MODEL from its config, weights or none, and say what fits on one chip of each kind.

    Counts 0.8 of a chip's memory for weights and cache. A model that is refused ends with the reason and status 1.
    """
    import dataclasses

    from jaxvllm.aot.info import chip_names, describe, fits
    from jaxvllm.models.checkpoint.hf_folder import HFFolder
    from jaxvllm.models.checkpoint.loader import check_weights, open_checkpoint, resolve_path
    from jaxvllm.models.checkpoint.orbax_folder import OrbaxFolder

    if length < 2 or block_size < 2:
        raise ValueError(f"--length={length} and --kvcache-block-size={block_size} must be at least 2.")
    checkpoint = open_checkpoint(resolve_path(model, weights=False))
    config = checkpoint.config if dtype == "auto" else dataclasses.replace(checkpoint.config, dtype=dtype)
    if isinstance(checkpoint, OrbaxFolder):
        quantization = "int8" if checkpoint.quantized else quantization
    elif not isinstance(checkpoint, HFFolder) or checkpoint.has_weights:
        check_weights(checkpoint)
    about = describe(config, quantization)
    _print_model(about, "the layers' products in int8" if quantization == "int8" else "")
    length = min(length, config.max_position_embeddings)
    click.echo(f"\nOne chip, sequences of {length:,} tokens, blocks of {block_size}:")
    click.echo("chip   memory     kernels  KV/token   blocks      sequences")
    for fit in fits(about, list(chips) or chip_names(), length=length, block_size=block_size):
        if fit.num_seqs:
            held = f"{fit.num_blocks:<10,}  {fit.num_seqs:,}"
        else:
            held = f"does not fit: weights and one sequence are what {fit.least_chips} chips hold"
        memory, per_token = _size(fit.memory_bytes), _size(fit.kv_bytes_per_token)
        click.echo(f"{fit.chip:5}  {memory:9}  {fit.backend:7}  {per_token:9}  {held}")


def _print_model(about: "ModelInfo", addition: str):
    config = about.config
    heads = f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    lines = {
        "architecture": f"{config.model_type}, {config.num_layers} layers, {heads}, hidden {config.hidden_size}",
        "vocabulary": f"{config.vocab_size:,}, head {'tied' if config.tie_word_embeddings else 'not tied'}",
        "longest": f"{config.max_position_embeddings:,} tokens",
        "parameters": f"{about.num_parameters:,}",
        "weights": ", ".join(filter(None, (f"{_size(about.weight_bytes)} in {config.dtype}", addition))),
    }
    for name, value in lines.items():
        click.echo(f"{name:14}{value}")


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
