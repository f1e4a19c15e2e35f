"""Compiling for a target, in a process started with `compile_environment`.

The compilers read their flags when they are first loaded, and the CUDA plugin stays with the first GPU that it is told of. So compiling
belongs into a process of its own, and each GPU into another one.
"""

import importlib.metadata
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.error_handling import MosaicError  # has no public name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.targets.target import Target

__all__ = ["compile_environment", "compile_for", "device_mesh", "require_compiler"]


def compile_environment(dump: pathlib.Path | None = None) -> dict[str, str]:
    """The environment of a process that compiles for targets; with `dump`, the compilers write what they made of kernels to that folder.

    JAX_PLATFORMS keeps JAX from looking for a device, and two more keep libtpu from asking the network what machine this is. libtpu takes
    a lock so that two processes never share a TPU; nothing here opens one, so any number may compile at a time. What comes out of JAX's
    cache was not compiled, and would leave no dump.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # the last line that a process says is then its error
    }
    if dump is not None:
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
        environment["LIBTPU_INIT_ARGS"] = f"{environment.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
        environment |= {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    return environment


def require_compiler(target: Target) -> None:
    """Says what to install where a target's compiler is missing.

    Raises:
      NotImplementedError: a package is not installed.
    """
    missing = [package for package in target.packages if not _installed(package)]
    if missing:
        raise NotImplementedError(f"compiling for {target.name} needs {', '.join(missing)}: install jaxpage[aot]")


def _installed(package: str) -> bool:
    return any(importlib.metadata.distributions(name=package))


def device_mesh(target: Target) -> Mesh:
    """A mesh of one device of a target. With it set, Pallas lowers for that device, which need not be there.

    Raises:
      NotImplementedError: the target's compiler is not installed.
    """
    require_compiler(target)
    return Mesh(np.array(target.topology().devices[:1]), ("device",))


def compile_for(target: Target, function: Callable[..., Any], *arguments: Any, donate_argnums: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles a function for one device of a target.

    Args:
      target: what to compile for.
      function: the function to compile.
      *arguments: its arguments: pytrees of `jax.ShapeDtypeStruct`.
      donate_argnums: the arguments whose memory the results may take.

    Raises:
      NotImplementedError: the target's compiler is not installed, or Mosaic does not compile a kernel in the function.
      jax.errors.JaxRuntimeError: XLA does not compile the function.
    """
    mesh = device_mesh(target)
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments)
    try:
        with jax.set_mesh(mesh), target.lowering():
            return jax.jit(function, donate_argnums=donate_argnums).lower(*placed).compile()
    except MosaicError as error:
        raise NotImplementedError(str(error)) from error
