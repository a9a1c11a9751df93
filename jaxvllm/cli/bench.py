"""`jaxvllm bench`: the numbers behind the documents."""

import click

from jaxvllm.cli.bench_engine import COMMANDS


@click.group()
def bench():
    """Measure, count and predict. Each prints a table and, as its last line, the same as JSON."""


for command in COMMANDS:
    bench.add_command(command)


@bench.command()
@click.option("--chip", default="v6e", help="v5e, v5p, v6e or tpu7x; it need not be here.")
@click.option(
    "--model", default="Qwen3-8B", help="Heads of Qwen3-0.6B, Qwen3-8B, Qwen3-8B/4 or Qwen3-8B/8 (a chip's share)."
)
@click.option("--workload", default="nano", help="nano: 256 sequences of 100 to 1,024 tokens; long: 16 of 32,768.")
@click.option("--block-size", default=64, help="Tokens per KV-cache block.")
@click.option("--prefill", "prefill_tokens", default=4096, help="Tokens of the prompt to count; 0 is none.")
def kernel(chip: str, model: str, workload: str, block_size: int, prefill_tokens: int):
    """Predict the TPU kernels' cost: bytes and cycles by count, no device involved.

    Bytes are those of the loops' copies, cycles the compiler's schedule, bandwidth and peak the vendor's. The time is
    max(bytes / bandwidth, cycles / clock) plus the first copy: a prediction, not a measurement.
    """
    from jaxvllm.bench import kernel as counts

    for name, value, known in (("model", model, counts.HEADS), ("workload", workload, counts.WORKLOADS)):
        if value not in known:
            raise ValueError(f"--{name}={value} is none of {', '.join(known)}.")
    reports = {f"decode, {workload}": counts.decode_report(chip, counts.HEADS[model], workload, block_size)}
    if prefill_tokens:
        report = counts.prefill_report(chip, counts.HEADS[model], prefill_tokens, block_size)
        reports[f"prefill, {prefill_tokens} tokens"] = report
    for title, report in reports.items():
        click.echo(f"{title}: {model} on {chip}, one layer, blocks of {block_size}")
        for key, value in report.items():
            shown = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            click.echo(f"  {key:24} {shown}")
