"""Writes the tables of docs/options.md and docs/sampling.md: `python -m tools.docs.option_tables`.

A row is a field of the dataclass: its name, the values it takes, its default and the comment at its end.
tests/test_docs.py checks that the pages are up to date.
"""

import inspect
import io
import tokenize
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxvllm.config import EngineConfig
from jaxvllm.sampling_params import SamplingParams

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- fields: python -m tools.docs.option_tables -->", "<!-- end of the fields -->"
PAGES: Mapping[str, type] = {"options.md": EngineConfig, "sampling.md": SamplingParams}


def table(cls: type) -> str:
    """Returns the Markdown table of a dataclass's fields."""
    comments, hints = field_comments(cls), get_type_hints(cls)
    lines = ["| name | values | default | meaning |", "|---|---|---|---|"]
    for field in fields(cls):
        cells = [f"`{field.name}`", _values(hints[field.name]), _default(field), comments[field.name]]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def field_comments(cls: type) -> dict[str, str]:
    """Returns the comment at the end of each field. Raises `ValueError` where a field has none."""
    names = {field.name for field in fields(cls)}
    comments: dict[str, str] = {}
    field_name, depth, at_line_start = None, 0, True
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        if token.type == tokenize.NAME and at_line_start and depth == 0 and token.string in names:
            field_name = token.string
        elif token.type == tokenize.COMMENT and field_name is not None:
            text = token.string.removeprefix("#").strip()
            comments[field_name] = f"{comments[field_name]} {text}" if field_name in comments else text
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0)
        at_line_start = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.NEWLINE:
            field_name = None
        if len(comments) == len(names) and token.type == tokenize.NEWLINE:
            break  # methods follow
    if missing := names - comments.keys():
        raise ValueError(f"{cls.__name__}: add a comment at the end of {', '.join(sorted(missing))}.")
    return comments


def write(page: Path, cls: type):
    """Replaces the table between the page's marks."""
    page.write_text(updated(page.read_text(encoding="utf-8"), cls), encoding="utf-8")


def updated(text: str, cls: type) -> str:
    """Returns the page's text with the table of `cls` between its marks."""
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n\n{table(cls)}\n\n{END}{tail}"


def _values(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value!r}`" for value in get_args(hint))
    if isinstance(hint, UnionType):
        return " or ".join(_values(choice) for choice in get_args(hint))
    if hint is type(None):
        return "`None`"
    return f"`{hint.__name__}`" if isinstance(hint, type) and not get_args(hint) else f"`{_plain(hint)}`"


def _plain(hint: Any) -> str:
    """`tuple[int, ...]` and the like, without the names of modules."""
    return str(hint).replace("collections.abc.", "").replace("typing.", "")


def _default(field: Field) -> str:
    return "required" if field.default is MISSING else f"`{field.default!r}`"


if __name__ == "__main__":
    for name, dataclass in PAGES.items():
        write(DOCS / name, dataclass)
