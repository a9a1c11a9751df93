"""From a model's name to a module with its weights on the device."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.models import registry
from jaxvllm.models.checkpoint.gguf import GGUFFile
from jaxvllm.models.checkpoint.hf_folder import HFFolder
from jaxvllm.models.checkpoint.orbax_folder import OrbaxFolder, is_orbax_folder
from jaxvllm.models.checkpoint.weight_map import Source, find_sources
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.layers import Linear
from jaxvllm.models.quantized import QuantizedWeight, quantize

# Where weights come from: `config`, `shapes` of the stored tensors, `stored_name(hf_name)`, and `read(stored name)`,
# which gives a host array of its own, [out, in] as Hugging Face has it, of any float dtype.
Checkpoint = HFFolder | GGUFFile | OrbaxFolder

# Asked with a weight's path ("layers.0.attention.q.weight") and shape; None is JAX's default device.
ShardingRule = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]

_ROTARY_BUFFER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed here, not loaded
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "vocab.txt", "merges.txt"]
_HUB_CONFIGS = ["config.json", "generation_config.json"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights
_NAMES_SHOWN = 5


def resolve_path(name: str, *, weights: bool = True) -> Path:
    """Returns the folder or file of a model: an existing one as it is, else the hub's, downloaded if need be.

    Without `weights` the hub is asked for the configs only.
    Only a name like `Qwen/Qwen3-0.6B` that is no existing path reaches the network. Raises ValueError on a path that
    does not exist and OSError, saying what to do, when the hub does not deliver.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # no such user
        raise ValueError(f"{name!r}: {error}") from error
    if name and path.exists():  # Path("") is the current folder
        return path
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith(".gguf") or "\\" in name
    if looks_like_path or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"{name!r} does not exist: give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B.")
    import huggingface_hub  # only here: a local model needs none of it

    try:
        wanted = _HUB_FILES if weights else _HUB_CONFIGS
        folder = huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=_NOT_HUB_FILES)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{name!r} is no folder or file here, and the Hugging Face hub did not deliver it "
            f"({type(error).__name__}: {_first_line(error)}). Check the name and the network, log in with "
            "`hf auth login` if the model is gated, or give the path of a downloaded folder."
        ) from error
    return Path(folder)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder or a GGUF file; reads headers only. Raises ValueError naming what is missing or broken."""
    if path.is_dir():
        return OrbaxFolder(path) if is_orbax_folder(path) else HFFolder(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a checkpoint folder or a .gguf file.")
    return GGUFFile(path)


def read_config(path: Path) -> ModelConfig:
    """Reads what a checkpoint says about its model, without the weights; `dtype` is that of the checkpoint."""
    return open_checkpoint(path).config


def loaded_config(checkpoint: Checkpoint, dtype: str = "auto") -> ModelConfig:
    """The config of a checkpoint loaded in `dtype`; auto is the checkpoint's own."""
    config = checkpoint.config
    return config if dtype == "auto" else dataclasses.replace(config, dtype=dtype)


def check_weights(checkpoint: HFFolder | GGUFFile):
    """Raises ValueError, as `load_model` would, unless the tensors stored are the model's. Reads headers only."""
    config = checkpoint.config
    model = nnx.eval_shape(lambda: registry.resolve(config.model_type).make(config))
    shapes = {".".join(map(str, keys)): param.shape for keys, param in nnx.to_flat_state(nnx.state(model))}
    _checked_sources(checkpoint, config, shapes)


def load_model(
    source: Path | Checkpoint,
    dtype: str = "auto",
    sharding: ShardingRule | None = None,
    *,
    quantization: str = "auto",
) -> tuple[ModelConfig, Decoder]:
    """Loads a checkpoint, one tensor at a time, each straight to where `sharding` says, in `dtype` (auto: its own).

    `quantization="int8"` rounds the weights of `quantizable` as they are read. Returns the config, its `dtype` now the
    one loaded, and the module. On the host, beside the weights themselves there are at most two tensors at a time.
    Raises ValueError naming tensors that are missing, surplus or mis-shaped.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    config = loaded_config(checkpoint, dtype)
    if config.num_layers > len(checkpoint.shapes):
        raise ValueError(f"{checkpoint.path}: {config.num_layers} layers do not fit {len(checkpoint.shapes)} tensors.")
    architecture = registry.resolve(config.model_type)
    abstract = nnx.eval_shape(lambda: architecture.make(config))
    graphdef, state = nnx.split(abstract)
    weights = {".".join(map(str, keys)): (keys, param) for keys, param in nnx.to_flat_state(state)}
    to_int8 = quantizable(abstract) if quantization == "int8" else frozenset()
    params = {ours: param for ours, (_, param) in weights.items()}
    if isinstance(checkpoint, OrbaxFolder):
        values = _restored(checkpoint, config, params, to_int8, sharding)
    else:
        values = _read(checkpoint, config, params, to_int8, sharding)
    loaded = [(weights[ours][0], params[ours].replace(value)) for ours, value in values]
    return config, nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _read(
    checkpoint: HFFolder | GGUFFile,
    config: ModelConfig,
    params: Mapping[str, nnx.Param],
    to_int8: frozenset[str],
    sharding: ShardingRule | None,
) -> Iterator[tuple[str, jax.Array | QuantizedWeight]]:
    """Yields each weight at its place."""
    shapes = {ours: param.shape for ours, param in params.items()}
    sources = _checked_sources(checkpoint, config, shapes)
    read = partial(checkpoint.read, dtype=config.dtype) if isinstance(checkpoint, HFFolder) else checkpoint.read
    for source in sources:
        for ours, host in source.read(shapes, read):
            place = sharding(ours, host.shape) if sharding else None
            if ours in to_int8:
                yield ours, _put_quantized(host, place, f"{checkpoint.path}: {source.names[0]!r}")
            else:
                yield ours, jax.device_put(host.astype(params[ours].dtype, copy=False), place)


def _checked_sources(
    checkpoint: HFFolder | GGUFFile, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> list[Source]:
    weights = registry.resolve(config.model_type).weights
    sources = find_sources(shapes, weights, checkpoint.shapes, checkpoint.stored_name)
    expected = {name: shape for source in sources for name, shape in source.stored_shapes(shapes).items()}
    _check_tensors(checkpoint, expected, config)
    return sources


def _restored(
    checkpoint: OrbaxFolder,
    config: ModelConfig,
    params: Mapping[str, nnx.Param],
    to_int8: frozenset[str],
    sharding: ShardingRule | None,
) -> Iterator[tuple[str, jax.Array | QuantizedWeight]]:
    """Yields each weight at its place: together, as Orbax reads best, but one by one those to be made int8."""
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = {ours: (sharding(ours, param.shape) if sharding else None) or default for ours, param in params.items()}
    targets = {}
    for ours, param in params.items():
        target = jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=places[ours])
        if ours in checkpoint.quantized:
            scales = jax.ShapeDtypeStruct(param.shape[:1], jnp.float32, sharding=scales_place(places[ours]))
            targets |= {f"{ours}.values": target.update(dtype=jnp.int8), f"{ours}.scales": scales}
        else:
            targets[ours] = target
    _check_tensors(checkpoint, {name: target.shape for name, target in targets.items()}, config)
    to_int8 -= checkpoint.quantized
    arrays = checkpoint.restore({name: target for name, target in targets.items() if name not in to_int8})
    for ours in params:
        if ours in to_int8:
            yield ours, _put_quantized(checkpoint.read(ours), places[ours], f"{checkpoint.path}: {ours!r}")
        elif ours in checkpoint.quantized:
            yield ours, QuantizedWeight(arrays[f"{ours}.values"], arrays[f"{ours}.scales"])
        else:
            yield ours, arrays[ours]


def quantizable(model: Decoder) -> frozenset[str]:
    """Returns the paths of the weights that int8 replaces: those of the layers' `Linear`s.

    Not the embedding and the head, whose rows are a token's own scores, nor a router, which decides where tokens go,
    nor norms, biases and what is no `Linear`.
    """
    return frozenset(
        ".".join(map(str, (*path, "weight")))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Linear) and path[-1] not in ("head", "router", "shared_gate")
    )


def _put_quantized(host: np.ndarray, place: jax.sharding.Sharding | None, name: str) -> QuantizedWeight:
    """Rounds a weight to int8 and places it, its scales where the rows are that they belong to."""
    try:
        values, scales = quantize(host)
    except ValueError as error:
        raise ValueError(f"{name} cannot be int8: {error}") from error
    return QuantizedWeight(jax.device_put(values, place), jax.device_put(scales, scales_place(place)))


def scales_place(place: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Returns where the scales of a weight go that is placed there."""
    if isinstance(place, jax.sharding.NamedSharding):
        return place.update(spec=jax.sharding.PartitionSpec(*place.spec[:1]))
    return place


def _check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], config: ModelConfig):
    """Raises ValueError unless the checkpoint holds exactly the expected tensors, buffers aside."""
    shapes = checkpoint.shapes
    ignored = {name for name in shapes if _ROTARY_BUFFER.search(name)}
    if config.tie_word_embeddings:
        ignored.add(checkpoint.stored_name("lm_head.weight"))  # saved by some, a copy of the embedding
    if missing := [name for name in expected if name not in shapes]:
        hint = ""
        if checkpoint.stored_name("lm_head.weight") in missing:
            hint = " The config says that the head is not tied to the embedding (tie_word_embeddings)."
        raise ValueError(f"{checkpoint.path} lacks {_listed(missing)}.{hint}")
    if surplus := sorted(shapes.keys() - expected.keys() - ignored):
        raise ValueError(f"{checkpoint.path} holds {_listed(surplus)}, which {config.model_type} has no place for.")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{checkpoint.path}: {name!r} is {list(shapes[name])}, but the config makes it {list(shape)}."
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
