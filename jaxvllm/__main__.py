"""`python -m jaxvllm` is the command `jaxvllm`."""

from jaxvllm.cli import main

main(prog_name="jaxvllm")
