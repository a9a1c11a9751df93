"""The TPU chips that programs can be compiled for without one: published figures, topologies, the compiler.

Needs libtpu (`pip install jaxvllm[tpu]`), and no device.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxvllm.kernels.paged_attention import CHIP_AXIS

_LIBTPU_WITHOUT_A_DEVICE = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud what this machine is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes may compile at once
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What JAX calls one device: a chip, but half of one for tpu7x.

    `hbm_bytes`, `hbm_bytes_per_s` and `flops_per_s` (bfloat16, dense) are the vendor's. `mxu_rows_per_cycle` is read
    off XLA's own estimate for a 4,096^3 product (1,083,068 cycles on v5e, 544,925 on v5p, 301,616 on v6e, 324,772 on
    tpu7x); the clock follows, since all matrix units busy make the published peak.
    """

    topology: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: float
    mxus: int
    mxu_width: int  # of the square array of multipliers
    mxu_rows_per_cycle: int
    cores: int = 1

    @property
    def clock_hz(self) -> float:
        return self.flops_per_s / (2 * self.mxus * self.mxu_width**2 * self.mxu_rows_per_cycle)


CHIPS = {
    "v5e": Chip(
        topology="v5e:2x2", hbm_bytes=16 * 10**9, hbm_bytes_per_s=819e9, flops_per_s=197e12,
        mxus=4, mxu_width=128, mxu_rows_per_cycle=1,
    ),
    "v5p": Chip(
        topology="v5p:2x2x1", hbm_bytes=95 * 10**9, hbm_bytes_per_s=2765e9, flops_per_s=459e12,
        mxus=8, mxu_width=128, mxu_rows_per_cycle=1, cores=2,
    ),
    "v6e": Chip(
        topology="v6e:2x2", hbm_bytes=32 * 10**9, hbm_bytes_per_s=1640e9, flops_per_s=918e12,
        mxus=2, mxu_width=256, mxu_rows_per_cycle=2,
    ),
    "tpu7x": Chip(
        topology="tpu7x:2x2x1", hbm_bytes=96 * 10**9, hbm_bytes_per_s=3690e9, flops_per_s=1153.5e12,
        mxus=2, mxu_width=256, mxu_rows_per_cycle=2,
    ),
}  # fmt: skip


def find_chip(name: str) -> Chip:
    """Returns the chip; raises ValueError naming those there are."""
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is none of {', '.join(CHIPS)}.")
    return CHIPS[name]


def why_no_compiler() -> str | None:
    """Returns why TPU programs cannot be compiled here, or None if they can."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install '.[tpu]'"
    return None


@cache
def mesh_of(name: str, num_chips: int = 1) -> Mesh:
    """Returns a mesh of devices of that kind, none of which need be here; raises ValueError where it cannot."""
    reason = why_no_compiler()
    if reason is not None:
        raise ValueError(f"cannot compile for {name}: {reason}.")
    for variable, value in _LIBTPU_WITHOUT_A_DEVICE.items():
        os.environ.setdefault(variable, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=find_chip(name).topology).devices
    if num_chips > len(devices):
        raise ValueError(f"{name}-{num_chips}: programs are compiled for up to {len(devices)} of these chips.")
    return Mesh(np.array(devices[:num_chips]), (CHIP_AXIS,))


def lower_for(name: str, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> jax.stages.Lowered:
    """Lowers `function` of pytrees of `ShapeDtypeStruct`s for one chip of that kind, the arguments all on it."""
    return lower_on(mesh_of(name), function, *arguments, donate=donate)


def lower_on(mesh: Mesh, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> jax.stages.Lowered:
    """Lowers `function` of pytrees of `ShapeDtypeStruct`s for a mesh; arguments without a sharding are replicated."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(x) -> jax.ShapeDtypeStruct:
        return x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    placed = jax.tree.map(place, arguments)
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*placed)
