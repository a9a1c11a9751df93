"""`jaxvllm convert`: any model as an Orbax checkpoint."""

from pathlib import Path
from typing import get_args

import click

from jaxvllm.config import Dtype, Quantization


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="auto", help="Of the stored weights.")
@click.option(
    "--quantization", type=click.Choice(get_args(Quantization)), default="auto", help="Of the layers' weights."
)
def convert(model: str, out: Path, dtype: str, quantization: str):
    """Write MODEL to the new folder OUT as an Orbax checkpoint, with config and tokenizer.

    OUT loads straight onto any number of devices, and appears only once it is whole.
    """
    from jaxvllm.convert import convert as write

    write(model, out, dtype=dtype, quantization=quantization)
    click.echo(f"Wrote {out}")
