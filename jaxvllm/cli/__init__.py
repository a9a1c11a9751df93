"""The command `jaxvllm`. One module per subcommand; jax and transformers load only once a command runs."""

import click

from jaxvllm.cli.bench import bench
from jaxvllm.cli.chat import chat
from jaxvllm.cli.compile import compile_command
from jaxvllm.cli.convert import convert
from jaxvllm.cli.demo import demo
from jaxvllm.cli.generate import generate
from jaxvllm.cli.info import info


class _Group(click.Group):
    """Turns what a user can cause (a wrong value, a missing file) into one line; `--debug` shows where it came from."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly when the reader of our output has gone
        except (ValueError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--debug", is_flag=True, help="Show a traceback where an error is reported.")
@click.version_option(package_name="jaxvllm")
def main(debug: bool):
    """Generate text with a language model on a TPU, a GPU or the CPU."""


for command in (generate, chat, demo, convert, info, bench, compile_command):
    main.add_command(command)
