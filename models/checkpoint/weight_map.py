"""An architecture's weight map, read: which stored tensor becomes which of our weights.

A map goes from Hugging Face's name of a tensor to our path, `*` standing for a number. Two forms go beyond one to one:

    "...qkv_proj.weight": ("...q.weight", "...k.weight", "...v.weight")   the tensor's rows are split, in this order
    "...experts.*.up_proj.weight": "...up.weight"     a * more: the tensors are stacked in order, each as [in, out]
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

WeightMap = Mapping[str, str | tuple[str, ...]]
Shape = tuple[int, ...]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Source(NamedTuple):
    """Tensors that are read together: one for one weight, one whose rows are several weights, or experts for one."""

    names: tuple[str, ...]  # stored
    paths: tuple[str, ...]  # ours
    form: Literal["rows", "experts", "stack"] = "rows"  # the last: experts that the checkpoint has stacked itself

    def stored_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Returns the shape each stored tensor must have, from the shapes of our weights."""
        first, *_ = (shapes[path] for path in self.paths)
        if self.form == "rows":
            return {name: (sum(shapes[path][0] for path in self.paths), *first[1:]) for name in self.names}
        E, inputs, outputs = first
        return dict.fromkeys(self.names, (outputs, inputs) if self.form == "experts" else (E, outputs, inputs))

    def read(self, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each path with its array; every stored tensor is read once, in the dtype it has."""
        if self.form != "rows":
            [path] = self.paths
            experts = map(read, self.names) if self.form == "experts" else read(*self.names)
            yield path, _stack_transposed(experts, shapes[path])
            return
        [rows] = map(read, self.names)
        start = 0
        for path in self.paths:
            end = start + shapes[path][0]
            yield path, rows if len(self.paths) == 1 else rows[start:end]
            start = end


def find_sources(
    shapes: Mapping[str, Shape],
    weights: WeightMap,
    stored: Mapping[str, Shape],
    stored_name: Callable[[str], str] = str,
) -> list[Source]:
    """Returns where the weights of a model come from, given their paths and shapes; each path once.

    `stored` are the checkpoint's tensors, `stored_name` turns Hugging Face's name into the one they have there. A stack
    is taken as one tensor where the checkpoint has it so, named without the number (as GGUF files do).
    """
    by_path = {path: (name, _as_tuple(paths)) for name, paths in weights.items() for path in _as_tuple(paths)}
    sources: dict[tuple[str, ...], Source] = {}  # by our paths: the weights of a fused tensor find the same one
    for path, shape in shapes.items():
        numbers = _NUMBER.findall(path)
        pattern = _NUMBER.sub("*", path)
        name, siblings = by_path[pattern]
        paths = tuple(_fill(sibling, numbers) for sibling in siblings)
        if name.count("*") == len(numbers):
            sources[paths] = Source((stored_name(_fill(name, numbers)),), paths)
        elif (whole := stored_name(_fill(".".join(name.rsplit(".*.", 1)), numbers))) in stored:
            sources[paths] = Source((whole,), paths, "stack")
        else:
            names = (stored_name(_fill(name, [*numbers, str(i)])) for i in range(shape[0]))
            sources[paths] = Source(tuple(names), paths, "experts")
    return list(sources.values())


def _stack_transposed(experts: Iterable[np.ndarray], shape: Shape) -> np.ndarray:
    """Stacks one expert after the other, so that beside the stack there is one at a time."""
    stack = None
    for i, expert in enumerate(experts):
        stack = np.empty(shape, expert.dtype) if stack is None else stack
        stack[i] = expert.T
    assert stack is not None  # a config has at least one expert
    return stack


def _as_tuple(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def _fill(pattern: str, numbers: list[str]) -> str:
    """Puts the numbers into the places of the stars."""
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
