"""TPUs that kernels are compiled for on a machine without one, and what their data sheets promise.

libtpu carries the whole TPU compiler, and compiles for a described topology with no device at hand. It reads its flags when it is first
loaded, so that compiling belongs into a process of its own, started with `compile_environment`.
"""

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.error_handling import MosaicError  # has no public name
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["MXU_ROWS", "TARGETS", "Target", "compile_environment", "compile_for", "device_mesh", "require_libtpu", "target_named"]


MXU_ROWS = 4
"""Rows of bfloat16 that the MXUs of a core take in a cycle: four MXUs one each up to v5p, two MXUs two each since v6e. So many does the
compiler's own table of its units have; with them the data sheets' FLOP/s give the clocks below."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One TPU generation. Rates are those of one TensorCore, because a schedule is the program of one core."""

    name: str
    topology: str
    """The smallest topology that libtpu describes."""
    device_kind: str
    """What JAX calls the device."""
    clock: float
    """Hz, assumed: the data sheets name no clock. It is the one at which the MXUs reach the data sheet's FLOP/s."""
    hbm: float
    """Bytes a second from HBM, by the data sheet."""
    flops: float
    """bfloat16 FLOP/s, by the data sheet."""
    mxu_width: int
    """Rows and columns of an MXU."""
    delay_slots: int
    """Bundles that still run behind a branch; seen in dumps, where a region ends so many bundles behind each branch."""
    platform: str = "tpu"

    @property
    def mxu_flops(self) -> int:
        """bfloat16 FLOPs of all MXUs of a core in a cycle."""
        return 2 * MXU_ROWS * self.mxu_width**2

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes from HBM in a cycle of the assumed clock."""
        return self.hbm / self.clock


# Data sheets: cloud.google.com/tpu/docs, one page a version. A chip of v4, v5p and 7x has two TensorCores, so their numbers are halved.
# JAX shows a v5p chip as one device of two cores, and each core of v4 (in these topologies) and 7x as a device of its own.
TARGETS = {
    target.name: target
    for target in (
        Target("v4", "v4:2x2x1", "TPU v4", 1.05e9, 1228e9 / 2, 275e12 / 2, 128, 1),
        Target("v5e", "v5e:2x2", "TPU v5 lite", 1.5e9, 819e9, 197e12, 128, 4),
        Target("v5p", "v5p:2x2x1", "TPU v5", 1.75e9, 2765e9 / 2, 459e12 / 2, 128, 4),
        Target("v6e", "v6e:2x2", "TPU v6 lite", 1.75e9, 1638e9, 918e12, 256, 4),
        Target("tpu7x", "tpu7x:2x2x1", "TPU7x", 2.2e9, 7380e9 / 2, 2307e12 / 2, 256, 4),
    )
}
"""The targets by name."""


def target_named(name: str) -> Target:
    """The target of a name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in TARGETS:
        raise ValueError(f"no target {name!r}; known are: {', '.join(TARGETS)}")
    return TARGETS[name]


def compile_environment(dump: pathlib.Path | None = None) -> dict[str, str]:
    """The environment of a process that compiles for targets; with `dump`, libtpu writes the schedules of all kernels to that folder.

    JAX_PLATFORMS keeps JAX from looking for a TPU, and the other two libtpu from asking the network what machine this is. libtpu takes a
    lock so that two processes never share a TPU; nothing here opens one, so any number may compile at a time. What comes out of JAX's
    cache was not compiled, and would leave no dump.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if dump is not None:
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
        environment["LIBTPU_INIT_ARGS"] = f"{environment.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return environment


def require_libtpu() -> None:
    """Says what to install where the compiler is missing.

    Raises:
      NotImplementedError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NotImplementedError("compiling for a TPU needs the package libtpu: install jaxpage[aot]")


def device_mesh(target: Target) -> Mesh:
    """A mesh of one device of a target. With it set, Pallas lowers for that device, which need not be there.

    Raises:
      NotImplementedError: libtpu is not installed.
    """
    require_libtpu()
    topology = topologies.get_topology_desc(topology_name=target.topology, platform=target.platform)
    return Mesh(np.array(topology.devices[:1]), ("device",))


def compile_for(target: Target, function: Callable[..., Any], *arguments: Any, donate_argnums: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles a function for one device of a target.

    Args:
      target: what to compile for.
      function: the function to compile.
      *arguments: its arguments: pytrees of `jax.ShapeDtypeStruct`.
      donate_argnums: the arguments whose memory the results may take.

    Raises:
      NotImplementedError: libtpu is not installed, or Mosaic does not compile a kernel in the function.
      jax.errors.JaxRuntimeError: XLA does not compile the function.
    """
    mesh = device_mesh(target)
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments)
    try:
        with jax.set_mesh(mesh):
            return jax.jit(function, donate_argnums=donate_argnums).lower(*placed).compile()
    except MosaicError as error:
        raise NotImplementedError(str(error)) from error
