"""Running the GPU kernels in their interpreter, with its checks on."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from attention_cases import Problem
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from oracle import paged_attention as oracle

import jaxpage
from pallas_kernels import layout

TOLERANCE = {"bfloat16": 2e-3, "float16": 3e-4}  # the weights of the softmax are rounded to these types

_QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # a case compiles once and runs once


def interpreted(function: Callable, *arguments: Any) -> Any:
    """The result of a compiled call whose kernels are interpreted; a race raises."""
    try:
        with jaxpage.interpret_kernels(gpu_params=plgpu.InterpretGPUParams(detect_races=True)):
            result = jax.block_until_ready(jax.jit(function, compiler_options=_QUICK_COMPILE)(*arguments))
        assert not interpret_pallas_call.get_races().races_found
        return result
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()  # a kernel that raised leaves its memory behind


def attend(problem: Problem, dtype: DTypeLike = jax.numpy.float32) -> tuple[jax.Array, layout.GpuStorage]:
    """`jaxpage.paged_attention` through the GPU kernels.

    Queries are given in float32 by default, so that the result is not rounded: rounding to bfloat16 alone is wrong by up to 4e-3.
    """
    q, *others = problem.arguments
    return interpreted(lambda *a: jaxpage.paged_attention(*a, **problem.options, implementation="gpu"), q.astype(dtype), *others)


def expected(problem: Problem) -> np.ndarray:
    """What the oracle says."""
    q, _, _, _, table, lengths, starts = problem.arguments
    return oracle(q, problem.keys, problem.values, table, lengths, starts, **problem.options)


def assert_close(out: jax.Array, target: np.ndarray, tolerance: float) -> None:
    """Finite, and no further from the target than this part of its largest value."""
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    assert np.abs(out - target).max() <= tolerance * max(np.abs(target).max(), 1e-30)
