"""`jaxvllm compile`: would this model run on that chip?"""

import warnings
from pathlib import Path
from typing import Any

import click

from jaxvllm.cli.options import engine_option

_MIB = 2**20


@click.command(name="compile")
@click.option("--chip", required=True, help="v5e-1, v5p-1, v6e-1, v6e-4, tpu7x-1, h100-1, h200-1, h100-4, ...")
@click.option("--model", required=True, type=click.Path(path_type=Path), help="A config.json, or a folder with one.")
@engine_option("--kvcache-block-size", int, "Tokens per block of the KV cache.")
@engine_option("--max-num-seqs", int, "Most sequences per step.")
@engine_option("--max-num-batched-tokens", int, "Most tokens per step.")
@engine_option("--max-model-len", int, "Most tokens per sequence, prompt and completion.")
def compile_command(chip: str, model: Path, **options: Any):
    """Compile a model's whole steps for chips that are not here, and report the memory they take on each.

    No weights are needed. Several chips share the heads and the weights.
    With JAX_COMPILATION_CACHE_DIR set, what is compiled is kept there.
    """
    # without the chip what is kept cannot be read back, which JAX warns of, and compiles again
    warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
    from jaxvllm.aot.compile import compile_steps
    from jaxvllm.config import EngineConfig

    config = EngineConfig(model=str(model), **options)
    for step in compile_steps(chip, model.parent if model.name == "config.json" else model, config):
        title = f"{step.name}, attention {step.backend}: "
        memory = f"arguments {step.argument_bytes // _MIB:,} MiB (cache {step.pool_bytes // _MIB:,} MiB"
        if step.refusal is not None:
            click.echo(f"{title}does not fit {step.hbm_bytes // _MIB:,} MiB; {memory}). {step.refusal}")
            continue
        cache = "aliased" if step.alias_bytes == step.pool_bytes else f"{step.alias_bytes // _MIB:,} MiB aliased"
        click.echo(
            f"{title}compiled in {step.compile_s:.1f} s; {memory}, {cache}), "
            f"temporaries {step.temp_bytes // _MIB:,} MiB: "
            f"{'fits' if step.fits else 'does not fit'} {step.hbm_bytes // _MIB:,} MiB"
        )
