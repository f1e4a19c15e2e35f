"""Compiles cases in a process of its own: `python -m pallas_kernels.report.worker FOLDER`, started with `targets.compile_environment`.

A line of JSON comes in for each case, a line of JSON goes out for each row. FOLDER is where the compilers dump what they made.
"""

import dataclasses
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp

from pallas_kernels.report.cases import SHAPES, Case
from pallas_kernels.report.kernels import KERNELS
from pallas_kernels.report.read_gpu import read_gpu
from pallas_kernels.report.read_tpu import read_tpu
from pallas_kernels.report.row import Row, refused_row
from pallas_kernels.report.shape import Build, Setting
from pallas_kernels.targets import compile_for, target_named

__all__ = ["compile_case"]

_READERS = {"tpu": read_tpu, "gpu": read_gpu}
# What kernels and compilers raise for something that they do not take.
_REFUSALS = (NotImplementedError, ValueError, jax.errors.JaxRuntimeError)


def compile_case(case: Case, folder: pathlib.Path) -> Row:
    """Compiles a case, and reads its program from the folder that the compiler dumps to.

    Returns:
      The row of the fastest call, or of the first if none could be measured.
    """
    setting = Setting(target_named(case.target), SHAPES[case.shape], case.block_size, jnp.dtype(case.kv_dtype))
    try:
        builds = KERNELS[case.kernel][setting.target.platform](setting)
    except _REFUSALS as error:
        return refused_row(case, _reason(error))
    rows = [_compile_build(case, setting, build, folder) for build in builds]
    return min(rows, key=lambda row: (not row.compiled, row.cycles_per_token or math.inf))


def _compile_build(case: Case, setting: Setting, build: Build, folder: pathlib.Path) -> Row:
    for path in folder.iterdir():
        path.unlink()
    try:
        compiled = compile_for(setting.target, build.function, *build.arguments, donate_argnums=build.donate)
    except _REFUSALS as error:
        return refused_row(case, _reason(error))
    row = _READERS[setting.target.platform](case, setting, build, folder)
    memory = compiled.memory_analysis()
    return dataclasses.replace(row, temp_bytes=memory.temp_size_in_bytes if memory and row.compiled else None)


def _reason(error: BaseException) -> str:
    """What an error says first; behind that come traces and the program."""
    return " ".join(str(error).split())[:250] or type(error).__name__


def main() -> None:
    """Serves cases until the input ends."""
    folder = pathlib.Path(sys.argv[1])
    for line in sys.stdin:
        row = compile_case(Case(**json.loads(line)), folder)
        print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
