"""From a model's name to a module with its weights on the device."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from flax import nnx

from jaxvllm.models import registry
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.decoder import Decoder
from jaxvllm.models.gguf import GGUFFile
from jaxvllm.models.hf_folder import HFFolder
from jaxvllm.models.weight_map import find_sources

# Where weights come from: `config`, `shapes` of the stored tensors, `stored_name(hf_name)`, and `read(stored name)`,
# which gives a host array of its own, [out, in] as Hugging Face has it, of any float dtype.
Checkpoint = HFFolder | GGUFFile

# Asked with a weight's path ("layers.0.attention.q.weight") and shape; None is JAX's default device.
ShardingRule = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]

_ROTARY_BUFFER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed here, not loaded
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "vocab.txt", "merges.txt"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights
_NAMES_SHOWN = 5


def resolve_path(name: str) -> Path:
    """Returns the folder or file of a model: an existing one as it is, else the hub's, downloaded if need be.

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
        folder = huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES)
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
        return HFFolder(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a checkpoint folder or a .gguf file.")
    return GGUFFile(path)


def read_config(path: Path) -> ModelConfig:
    """Reads what a checkpoint says about its model, without the weights; `dtype` is that of the checkpoint."""
    return open_checkpoint(path).config


def load_model(
    source: Path | Checkpoint, dtype: str = "auto", sharding: ShardingRule | None = None
) -> tuple[ModelConfig, Decoder]:
    """Loads a checkpoint, one tensor at a time, each straight to where `sharding` says, in `dtype` (auto: its own).

    Returns the config, its `dtype` now the one loaded, and the module. On the host, beside the weights themselves
    there are at most two tensors at a time. Raises ValueError naming tensors that are missing, surplus or mis-shaped.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    config = checkpoint.config
    if dtype != "auto":
        config = dataclasses.replace(config, dtype=dtype)
    if config.num_layers > len(checkpoint.shapes):
        raise ValueError(f"{checkpoint.path}: {config.num_layers} layers do not fit {len(checkpoint.shapes)} tensors.")
    architecture = registry.resolve(config.model_type)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: architecture.make(config)))
    weights = {".".join(map(str, keys)): (keys, param) for keys, param in nnx.to_flat_state(state)}
    shapes = {ours: param.shape for ours, (_, param) in weights.items()}
    sources = find_sources(shapes, architecture.weights, checkpoint.shapes, checkpoint.stored_name)
    expected = {name: shape for part in sources for name, shape in part.stored_shapes(shapes).items()}
    _check_tensors(checkpoint, expected, config)

    loaded = []
    for part in sources:
        for ours, host in part.read(shapes, checkpoint.read):
            keys, param = weights[ours]
            place = sharding(ours, host.shape) if sharding else None
            loaded.append((keys, param.replace(jax.device_put(host.astype(param.dtype, copy=False), place))))
    return config, nnx.merge(graphdef, nnx.from_flat_state(loaded))


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
