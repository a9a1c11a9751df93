"""What engine options and sampling parameters have in common: numbers, and names that are refused when misspelt."""

import difflib
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import wraps
from typing import Any


def python_scalar(value: Any) -> Any:
    """Returns a numpy scalar as Python's int, float, bool or str; everything else unchanged."""
    numpy = sys.modules.get("numpy")  # not imported here: the CLI's help starts without it
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def is_int(value: object) -> bool:
    """Whether the value is an integer, excluding bools."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether the value is an int or a float, excluding bools."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def store_python_scalars(instance: Any):
    """Replaces the numpy scalars among a frozen dataclass's fields; for its `__post_init__`."""
    for field in fields(instance):
        object.__setattr__(instance, field.name, python_scalar(getattr(instance, field.name)))


def check_names(names: Iterable[str], known: Iterable[str], kind: str):
    """Raises `ValueError` on a name that is not known, with the nearest one that is."""
    known = tuple(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"the {kind}s are {', '.join(known)}."
            raise ValueError(f"unknown {kind} {name!r}: {hint}")


def refuse_unknown_names[T](kind: str):
    """Returns a decorator of a dataclass: an unknown keyword raises the `ValueError` of `check_names`."""

    def decorate(cls: type[T]) -> type[T]:
        construct: Any = cls.__init__
        known = tuple(field.name for field in fields(cls))  # pyright: ignore[reportArgumentType]  # a dataclass
        known_set = frozenset(known)

        @wraps(construct)
        def init(self: T, *args: Any, **options: Any):
            if not options.keys() <= known_set:
                check_names(options, known, kind)
            construct(self, *args, **options)

        cls.__init__ = init
        return cls

    return decorate
