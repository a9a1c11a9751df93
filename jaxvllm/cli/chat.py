"""`jaxvllm chat`: a conversation in the terminal."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from jaxvllm.cli.options import engine_and_sampling_options, load_llm, split_options

if TYPE_CHECKING:
    from jaxvllm.llm import LLM
    from jaxvllm.sampling_params import SamplingParams

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@click.command()
@click.argument("model")
@click.option("--system", help="What the model is told before the conversation.")
@engine_and_sampling_options(max_tokens=512)
def chat(model: str, system: str | None, **options: Any):
    """Talk with MODEL: a folder, a .gguf file or a hub name of a model tuned for chat."""
    engine_options, sampling_params = split_options(options)
    llm = load_llm(model, engine_options)
    llm.tokenizer.check_chat_template()  # now, not after the first question
    session = ChatSession(llm, sampling_params, system)
    click.echo(_HELP, err=True)
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                session.reset()
            case command if re.fullmatch(r"/\w*", command):
                click.echo(f"{command} is no command: {_HELP}", err=True)
            case _:
                _answer(session, line)


def _answer(session: "ChatSession", line: str):
    """Prints the answer as it comes; what is wrong with this turn alone does not end the session."""
    try:
        for text in session.ask(line):
            click.echo(text, nl=False)
        click.echo()
    except ValueError as error:
        click.echo(f"Error: {error}", err=True)


class ChatSession:
    """A conversation: who said what, and the model that answers."""

    def __init__(self, llm: "LLM", sampling_params: "SamplingParams", system: str | None = None):
        self._llm = llm
        self._sampling_params = sampling_params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self):
        """Forgets what was said."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer as it comes. Ctrl-C ends it early; what was said until then stays in the conversation.

        Raises `ValueError`, leaving the conversation as it was, when the model cannot take this turn.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        token_ids = self._llm.tokenizer.apply_chat_template(messages)
        deltas = self._llm.stream(token_ids, self._sampling_params)
        answer = []
        with _interrupt_flag() as interrupted:
            for delta in deltas:
                answer.append(delta)
                yield delta
                if interrupted:
                    break
        deltas.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator: this aborts an unfinished request
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


@contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """Gives a list that Ctrl-C makes non-empty. A second Ctrl-C interrupts as usual.

    An exception in the middle of a step would leave the engine between two states; a flag is read between steps.
    """
    interrupts: list[int] = []

    def on_interrupt(signum: int, frame: Any):
        if interrupts:
            signal.default_int_handler(signum, frame)
        interrupts.append(signum)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _read_line() -> str | None:
    """Reads what the user says; None at the end. Ctrl-C gives up the line, not the session."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # its import gives `input` a history and keys to edit with
    while True:
        try:
            return input("> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
