"""`jaxvllm bench`: the numbers behind the documents."""

import click

from jaxvllm.cli.bench_engine import COMMANDS

_POSITIVE = click.IntRange(min=1)


@click.group()
def bench():
    """Measure, count and predict. Each prints a table and, as its last line, the same as JSON."""


for command in COMMANDS:
    bench.add_command(command)


@bench.command()
@click.option("--chip", default="v6e", help="v5e, v5p, v6e or tpu7x; it need not be here.")
@click.option(
    "--heads", default="Qwen3-8B", help="Those of Qwen3-0.6B, Qwen3-8B, Qwen3-8B/4 or Qwen3-8B/8 (a chip's share)."
)
@click.option("--workload", default="nano", help="nano: 256 sequences of 100 to 1,024 tokens; long: 16 of 32,768.")
@click.option("--kvcache-block-size", "block_size", default=64, help="Tokens per block of the KV cache.")
@click.option("--prefill", "prefill_tokens", default=4096, help="Tokens of the prompt to count; 0 is none.")
def kernel(chip: str, heads: str, workload: str, block_size: int, prefill_tokens: int):
    """Predict the TPU kernels' cost: bytes and cycles by count, no device involved.

    Bytes are those of the loops' copies, cycles the compiler's schedule, bandwidth and peak the vendor's. The time is
    max(bytes / bandwidth, cycles / clock) plus the first copy: a prediction, not a measurement.
    """
    from jaxvllm.aot import chips
    from tools.tpu import kernel as counts

    for name, value, known in (("heads", heads, counts.HEADS), ("workload", workload, counts.WORKLOADS)):
        if value not in known:
            raise ValueError(f"--{name}={value} must be one of {', '.join(known)}.")
    chips.mesh_of(chip)  # says what is missing, here and not in the process that compiles
    reports = {f"decode, {workload}": counts.decode_report(chip, counts.HEADS[heads], workload, block_size)}
    if prefill_tokens:
        report = counts.prefill_report(chip, counts.HEADS[heads], prefill_tokens, block_size)
        reports[f"prefill, {prefill_tokens} tokens"] = report
    for title, report in reports.items():
        click.echo(f"{title}: {heads} on {chip}, one layer, blocks of {block_size}")
        for key, value in report.items():
            shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            click.echo(f"  {key:24} {shown}")


@bench.command()
@click.option(
    "--tokens",
    "token_counts",
    type=_POSITIVE,
    multiple=True,
    default=(8, 256),
    show_default=True,
    help="Tokens of a step.",
)
@click.option("--experts", "num_experts", type=_POSITIVE, default=64, show_default=True)
@click.option("--per-token", type=_POSITIVE, default=8, show_default=True, help="Experts that a token goes through.")
@click.option("--hidden-size", type=_POSITIVE, default=512, show_default=True)
@click.option("--intermediate-size", type=_POSITIVE, default=256, show_default=True, help="Of each expert.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
def experts(token_counts: tuple[int, ...], num_experts: int, per_token: int, dtype: str, **sizes: int):
    """Time the forms of a mixture of experts on this machine's default device."""
    from tools.cpu.experts import time_forms

    if per_token > num_experts:
        raise ValueError(f"--per-token={per_token} is more than the {num_experts} experts there are (--experts).")
    for num_tokens in token_counts:
        click.echo(f"{num_tokens} tokens to {per_token} of {num_experts} experts, {dtype}")
        for name, seconds in time_forms(num_tokens, num_experts=num_experts, per_token=per_token, dtype=dtype, **sizes):
            click.echo(f"  {name:12} {1e3 * seconds:8.1f} ms")
