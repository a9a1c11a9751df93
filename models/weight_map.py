"""An architecture's weight map, read: which stored tensor becomes which of our weights.

A map goes from Hugging Face's name of a tensor to our path, `*` standing for a number. Two forms go beyond one to one:

    "...qkv_proj.weight": ("...q.weight", "...k.weight", "...v.weight")   the tensor's rows are split, in this order
    "...experts.*.up_proj.weight": "...up.weight"                        a * more: the tensors are stacked, in order
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

WeightMap = Mapping[str, str | tuple[str, ...]]
Shape = tuple[int, ...]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Stored(Protocol):
    """What is asked of a checkpoint."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...  # of every tensor, under its stored name

    def stored_name(self, hf_name: str) -> str: ...


class Source(NamedTuple):
    """Tensors that are read together: one for one weight, one whose rows are several weights, or a stack for one."""

    names: tuple[str, ...]  # stored
    paths: tuple[str, ...]  # ours

    def stored_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Returns the shape each stored tensor must have, from the shapes of our weights."""
        first = shapes[self.paths[0]]
        if len(self.names) > 1:
            return dict.fromkeys(self.names, first[1:])
        return {self.names[0]: (sum(shapes[path][0] for path in self.paths), *first[1:])}

    def read(self, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each path with its array; every stored tensor is read once, in the dtype it has."""
        if len(self.names) > 1:
            stack = np.stack([read(name) for name in self.names])
            yield self.paths[0], stack
            return
        rows, start = read(self.names[0]), 0
        for path in self.paths:
            end = start + shapes[path][0]
            yield path, rows if len(self.paths) == 1 else rows[start:end]
            start = end


def find_sources(shapes: Mapping[str, Shape], weights: WeightMap, stored: Stored) -> list[Source]:
    """Returns where the weights of a model come from, given their paths and shapes; each path once.

    A stack is taken as one tensor where the checkpoint has it so, named without the number (as GGUF files do).
    """
    by_path = {path: (name, _as_tuple(paths)) for name, paths in weights.items() for path in _as_tuple(paths)}
    sources: dict[tuple[str, ...], Source] = {}  # by our paths: the weights of a fused tensor find the same one
    for path, shape in shapes.items():
        numbers = _NUMBER.findall(path)
        pattern = _NUMBER.sub("*", path)
        name, siblings = by_path[pattern]
        paths = tuple(_fill(sibling, numbers) for sibling in siblings)
        if name.count("*") == len(numbers):
            names = (stored.stored_name(_fill(name, numbers)),)
        else:
            whole = stored.stored_name(_fill(".".join(name.rsplit(".*.", 1)), numbers))
            stack = (stored.stored_name(_fill(name, [*numbers, str(i)])) for i in range(shape[0]))
            names = (whole,) if whole in stored.shapes else tuple(stack)
        sources[paths] = Source(names, paths)
    return list(sources.values())


def _as_tuple(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def _fill(pattern: str, numbers: list[str]) -> str:
    """Puts the numbers into the places of the stars."""
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
