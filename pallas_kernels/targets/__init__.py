"""The devices that kernels are compiled for on a machine without one, what their data sheets promise, and the compiling."""

from pallas_kernels.targets.compile import compile_environment, compile_for, device_mesh, require_compiler
from pallas_kernels.targets.gpu import GPUS, GpuTarget
from pallas_kernels.targets.target import Target
from pallas_kernels.targets.tpu import MXU_ROWS, TPUS, TpuTarget

__all__ = [
    "MXU_ROWS",
    "TARGETS",
    "GpuTarget",
    "Target",
    "TpuTarget",
    "compile_environment",
    "compile_for",
    "device_mesh",
    "require_compiler",
    "target_named",
]

TARGETS: dict[str, Target] = {target.name: target for target in (*TPUS, *GPUS)}
"""The targets by name."""


def target_named(name: str) -> Target:
    """The target of a name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in TARGETS:
        raise ValueError(f"no target {name!r}; known are: {', '.join(TARGETS)}")
    return TARGETS[name]
