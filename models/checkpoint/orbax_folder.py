"""A checkpoint that `jaxvllm convert` wrote: weights in Orbax's format under our own names, config and tokenizer."""

import dataclasses
import json
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np
from flax import nnx

from jaxvllm.models.config import ModelConfig, read_json
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.quantized import QuantizedWeight

_FORMAT = 1
_MARKER = "jaxvllm.json"  # written last: a folder without it is no checkpoint
_WEIGHTS = "weights"
_CHUNK_BYTES = 32 * 2**20  # of a stored tensor: a device that holds a part of it reads few others


class OrbaxFolder:
    """The tensors and the config of a converted folder.

    A tensor's name is our path of the weight; a weight of int8 is two, `<path>.values` and `<path>.scales`. Raises
    ValueError naming the folder when something is missing, damaged or of another version.
    """

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def config(self) -> ModelConfig:
        try:
            return _decoded(ModelConfig, self._marker.get("model"), "model")
        except ValueError as error:
            raise ValueError(
                f"{self.path / _MARKER}: {error} Was it written by another version? Convert the model again."
            ) from error

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Paths of the weights that are stored as int8."""
        return frozenset(name.removesuffix(".values") for name in self.shapes if name.endswith(".values"))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, under its stored name."""
        return {name: array.shape for name, array in self._stored.items()}

    @cached_property
    def _stored(self) -> dict[str, jax.ShapeDtypeStruct]:
        with self._checkpointer() as (checkpointer, folder):
            stored = checkpointer.metadata(folder).item_metadata
            arrays = getattr(stored, "tree", stored).items()
            return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays}

    @cached_property
    def _marker(self) -> dict[str, Any]:
        marker = read_json(self.path / _MARKER)
        if marker.get("format") != _FORMAT:
            raise ValueError(
                f"{self.path} has the format {marker.get('format')!r}, this version reads {_FORMAT}: convert it again."
            )
        return marker

    def stored_name(self, name: str) -> str:
        return name

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor to the host, in the dtype it is stored in."""
        place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        return np.asarray(self.restore({name: self._stored[name].update(sharding=place)})[name])

    def restore(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads tensors, each straight to the devices and the dtype of its target; on whatever devices they were."""
        import orbax.checkpoint as ocp

        args = {
            name: ocp.ArrayRestoreArgs(sharding=target.sharding, dtype=target.dtype, global_shape=target.shape)
            for name, target in targets.items()
        }
        with self._checkpointer() as (checkpointer, folder):
            return checkpointer.restore(
                folder, args=ocp.args.PyTreeRestore(item=dict(targets), restore_args=args, partial_restore=True)
            )

    @contextmanager
    def _checkpointer(self) -> Iterator[tuple[Any, Path]]:
        import orbax.checkpoint as ocp  # here: it takes seconds, and most checkpoints are others

        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                yield checkpointer, (self.path / _WEIGHTS).absolute()
        except Exception as error:  # Orbax and tensorstore raise many kinds
            raise ValueError(f"{self.path / _WEIGHTS} is damaged or incomplete: {error}") from error


def is_orbax_folder(path: Path) -> bool:
    """Whether a folder is a finished conversion. Raises ValueError where it is an unfinished one."""
    if (path / _MARKER).is_file():
        return True
    if any(path.glob(f"{_WEIGHTS}*/")) and not (path / "config.json").exists():
        raise ValueError(f"{path} is a conversion that was interrupted: delete it and convert again.")
    return False


def write_orbax(folder: Path, config: ModelConfig, model: Decoder):
    """Writes the weights, wherever they are, then the config; the folder is a checkpoint from then on."""
    import orbax.checkpoint as ocp

    tensors = {}
    for keys, param in nnx.to_flat_state(nnx.state(model)):
        path, value = ".".join(map(str, keys)), param[...]
        if isinstance(value, QuantizedWeight):
            tensors |= {f"{path}.values": value.values, f"{path}.scales": value.scales}
        else:
            tensors[path] = value
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tensors}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((folder / _WEIGHTS).absolute(), args=ocp.args.PyTreeSave(tensors, save_args=chunks))
    marker = {"format": _FORMAT, "model": _encoded(config)}
    (folder / _MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


def _encoded(value: Any) -> Any:
    """Returns a value of a config as JSON has it."""
    if dataclasses.is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_encoded(item) for item in value] if isinstance(value, tuple) else value


def _decoded(kind: Any, value: Any, name: str) -> Any:
    """Returns a value of a config from JSON, by the type it has there. Raises ValueError naming what does not fit."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and types.NoneType in get_args(kind):
            return None
        [kind] = [arm for arm in get_args(kind) if arm is not types.NoneType]
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            odd = sorted(hints.keys() ^ value.keys()) if isinstance(value, dict) else "everything"
            raise ValueError(f"{name} lacks, or has too much: {odd}.")
        return kind(**{field: _decoded(hints[field], value[field], field) for field in hints})  # pyright: ignore[reportCallIssue]
    if get_origin(kind) in (tuple, frozenset) and isinstance(value, list):
        return get_origin(kind)(_decoded(get_args(kind)[0], item, name) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if get_origin(kind) is not None or type(value) is not kind:
        raise ValueError(f"{name}={value!r} is no {kind}.")
    return value
