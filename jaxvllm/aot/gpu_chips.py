"""The NVIDIA chips that programs can be compiled for without one, by the true compiler.

Needs the CUDA plugin (`pip install jax[cuda13-local]` beside a CUDA toolkit, or `jaxvllm[cuda13]`), and no device.
The descriptions of the chips are XLA's, in text: the folder `gpu_targets`.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxvllm.aot.chips import lower_on
from jaxvllm.kernels.paged_attention import CHIP_AXIS

_TARGETS = Path(__file__).parent / "gpu_targets"
CHIPS = tuple(sorted(path.stem for path in _TARGETS.glob("*.txtpb")))


def why_no_compiler() -> str | None:
    """Returns why GPU programs cannot be compiled here, or None if they can."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "the CUDA plugin is not installed: pip install '.[cuda13]', or 'jax[cuda13-local]'"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "set JAX_PLATFORMS=cpu: else the plugin looks for a device, and without one cannot be used"
    return None


def memory_bytes(chip: str) -> int:
    """Returns a chip's memory by its description."""
    [found] = re.findall(r"device_memory_size: (\d+)", _description(chip))
    return int(found)


def compute_capability(chip: str) -> str:
    """Returns a chip's compute capability by its description, as "9.0"."""
    [(major, minor)] = re.findall(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", _description(chip))
    return f"{major}.{minor or 0}"


def _description(chip: str) -> str:
    return (_TARGETS / f"{chip}.txtpb").read_text()


@cache
def mesh_of(chip: str, num_chips: int = 1) -> Mesh:
    """Returns a mesh of GPUs of that kind, none of which need be here; raises ValueError where it cannot."""
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is none of {', '.join(CHIPS)}.")
    reason = why_no_compiler()
    if reason is not None:
        raise ValueError(f"cannot compile for {chip}: {reason}.")
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{num_chips}", target_config=_description(chip)
    )
    return Mesh(np.array(topology.devices), (CHIP_AXIS,))


def lower_for(chip: str, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> jax.stages.Lowered:
    """Lowers `function` of pytrees of `ShapeDtypeStruct`s for one chip of that kind, the arguments all on it."""
    return lower_on(mesh_of(chip), function, *arguments, donate=donate)
