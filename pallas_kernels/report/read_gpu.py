"""What ptxas says of a compiled kernel in Mosaic GPU's dump, as numbers of a row."""

import math
import pathlib
import re
from typing import NamedTuple

from pallas_kernels.report.cases import Case
from pallas_kernels.report.row import Row, compiled_row, refused_row, with_rates
from pallas_kernels.report.shape import Build, Setting
from pallas_kernels.targets import GpuTarget

__all__ = ["Resources", "read_gpu", "read_resources"]

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
_THREADS = re.compile(r"threads\([^)]*\) in \(%\w+ = %c(\d+)\w*, %\w+ = %c(\d+)\w*, %\w+ = %c(\d+)\w*\)")


class Resources(NamedTuple):
    """What one kernel takes of a multiprocessor."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int


def read_resources(folder: pathlib.Path) -> list[Resources]:
    """The resources of every kernel that was dumped to a folder.

    Raises:
      ValueError: a dump is not as this reads it.
    """
    return [_read(path, path.with_suffix(".before_layout_inference.txt")) for path in sorted(folder.glob("*.ptxas"))]


def _read(ptxas: pathlib.Path, module: pathlib.Path) -> Resources:
    said, launch = (path.read_text(errors="replace") if path.exists() else "" for path in (ptxas, module))
    registers, spills, shared, threads = _REGISTERS.search(said), _SPILLS.search(said), _SHARED.search(launch), _THREADS.search(launch)
    if registers is None or spills is None or shared is None or threads is None:
        raise ValueError(f"cannot read registers, spills, shared memory and threads off {ptxas.name} and {module.name}")
    return Resources(int(registers[1]), int(spills[1]) + int(spills[2]), int(shared[1]), math.prod(map(int, threads.groups())))


def read_gpu(case: Case, setting: Setting, build: Build, folder: pathlib.Path) -> Row:
    """The row of a compiled call, with what its hungriest kernel takes. A write may be XLA's own, and has none of it then.

    Mosaic holds every kernel to the shared memory of a Hopper where it does not see the device, so that the target's own is checked here.
    """
    target = setting.target
    assert isinstance(target, GpuTarget)
    try:
        kernels = read_resources(folder)
    except ValueError as error:
        return compiled_row(case, reason=str(error))
    if build.queries and not kernels:
        return compiled_row(case, reason="no kernel was dumped")
    available = target.architecture.shared_memory
    if (taken := max((kernel.shared_bytes for kernel in kernels), default=0)) > available:
        return refused_row(case, f"takes {taken} bytes of shared memory, and there are {available}")
    numbers = {}
    if kernels:
        numbers = {
            "registers": max(kernel.registers for kernel in kernels),
            "spill_bytes": sum(kernel.spill_bytes for kernel in kernels),
            "shared_bytes": taken,
            "occupancy": min(target.occupancy(kernel.threads, kernel.registers, kernel.shared_bytes) for kernel in kernels),
        }
    return with_rates(compiled_row(case, **numbers), setting, build, build.matrix_flops / target.matrix_flops)
