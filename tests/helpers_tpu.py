"""Running the TPU kernels in their interpreter, with its checks on, and comparing what comes out."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from attention_cases import Case, Problem
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.typing import ArrayLike
from oracle import paged_attention as oracle

import jaxpage
from pallas_kernels import layout

MODES = ("eager", "on_wait")
"""When a copy takes place: at once, or not before somebody waits for it. Either hides faults that the other shows."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "int8": 1e-2, "float8_e4m3fn": 2e-2}

_QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # a case compiles once and runs once


def interpreted(mode: str, function: Callable, *arguments: Any, num_cores: int = 1) -> Any:
    """The result of a compiled call whose kernels are interpreted; a race raises."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, num_cores_or_threads=num_cores)
    try:
        with jaxpage.interpret_kernels(params):
            result = jax.block_until_ready(jax.jit(function, compiler_options=_QUICK_COMPILE)(*arguments))
        assert not interpret_pallas_call.races.races_found
        return result
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # a kernel that raised leaves its memory behind


def attend(mode: str, problem: Problem) -> tuple[jax.Array, layout.Storage]:
    """`jaxpage.paged_attention` through the TPU kernels."""
    return interpreted(mode, lambda *a: jaxpage.paged_attention(*a, **problem.options, implementation="tpu"), *problem.arguments)


def stored(case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values that the storage holds after the write, as the kernel reads them."""
    scales = np.ones(2, np.float32) if case.kv_scales is None else case.kv_scales
    keys, values = (np.asarray(side, np.float32) * scale for side, scale in zip(layout.unpack(problem.after), scales, strict=True))
    return keys, values


def expected(problem: Problem, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What the oracle says."""
    q, _, _, _, table, lengths, starts = problem.arguments
    options = {name: value for name, value in problem.options.items() if name != "kv_scales"}
    return oracle(q, keys, values, table, lengths, starts, **options)


def relative_error(out: ArrayLike, target: np.ndarray) -> float:
    """The largest difference, measured by the largest value."""
    return float(np.abs(np.asarray(out, np.float64) - target).max() / max(np.abs(target).max(), 1e-30))


def assert_same_bits(one: ArrayLike, other: ArrayLike) -> None:
    """Equal to the bit, whatever number a NaN is."""
    one, other = (np.atleast_1d(np.asarray(array)) for array in (one, other))
    assert one.dtype == other.dtype
    bits = np.dtype(f"u{one.dtype.itemsize}")
    np.testing.assert_array_equal(one.view(bits), other.view(bits))
