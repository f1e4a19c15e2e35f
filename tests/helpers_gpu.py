"""Running the GPU kernels in their interpreter, with its checks on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from attention_cases import Case, Problem, build
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from oracle import paged_attention as oracle

import jaxpage
from pallas_kernels import layout

STORAGE = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "float8": {"dtype": "float8_e4m3fn"},
    "int8 scaled": {"dtype": "int8", "scaled": True},
    "float8 scaled": {"dtype": "float8_e4m3fn", "scaled": True},
}


def levels(batch: str, batches: Mapping[str, Mapping]) -> dict[str, tuple]:
    """All that calls vary in; `batch` names the kinds of batches."""
    return {
        "block_size": (8, 16, 64, 128),
        "storage": tuple(STORAGE),
        "head_dim": (64, 80, 96, 128, 256),
        "group": (1, 3, 4, 8, 11),
        "kv_heads": (1, 3, 8),
        batch: tuple(batches),
        "window": (None, 1, 37, "block", 100),
        "soft_cap": (None, 3.0),
        "sinks": (False, True),
        "width": (None, 41),
    }


def case_of(row: dict, batch: str, batches: Mapping[str, Mapping]) -> Case:
    """The case of one level each."""
    window = row["block_size"] if row["window"] == "block" else row["window"]
    options = {name: level for name, level in row.items() if name not in ("storage", batch, "window")}
    return Case(**options, **STORAGE[row["storage"]], **batches[row[batch]], window=window)


# The weights of the softmax are rounded to the dtype of the products, and queries that are multiplied by `kv_scales` once more. That is
# bfloat16 for 8 bits; what it costs to store 8 bits is not in it, because the oracle gets what is stored.
TOLERANCE = {"bfloat16": 3e-3, "float16": 4e-4, "int8": 6e-3, "float8_e4m3fn": 6e-3}

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


def stored(case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values that the storage holds after the write, as the kernel reads them."""
    scales = np.ones(2, np.float32) if case.kv_scales is None else case.kv_scales
    keys, values = (np.asarray(side, np.float32) * scale for side, scale in zip(layout.unpack(problem.after), scales, strict=True))
    return keys, values


def expected(problem: Problem, keys: np.ndarray | None = None, values: np.ndarray | None = None) -> np.ndarray:
    """What the oracle says for some keys and values; None: those before any rounding."""
    q, _, _, _, table, lengths, starts = problem.arguments
    options = {name: value for name, value in problem.options.items() if name != "kv_scales"}
    keys, values = (problem.keys, problem.values) if keys is None else (keys, values)
    return oracle(q, keys, values, table, lengths, starts, **options)


def with_poisoned_scales(problem: Problem) -> Problem:
    """NaN in the scale of every slot that holds no token, too."""
    unused = jax.numpy.swapaxes(jax.numpy.repeat(np.isnan(problem.keys[..., 0]), 2, axis=2), 1, 2)

    def poison(storage: layout.GpuStorage) -> layout.GpuStorage:
        return dataclasses.replace(storage, scales=jax.numpy.where(unused, np.nan, storage.scales))

    arguments = tuple(poison(each) if isinstance(each, layout.GpuStorage) else each for each in problem.arguments)
    return dataclasses.replace(problem, arguments=arguments, after=poison(problem.after))


def check(case: Case, seed: int) -> None:
    """Output and storage of one case against the oracle."""
    problem = build(case, seed, backend="gpu")
    if case.scaled:
        problem = with_poisoned_scales(problem)
    out, storage = attend(problem)
    assert_close(out, expected(problem, *stored(case, problem)), TOLERANCE[case.dtype])
    for after, target in zip(jax.tree.leaves(storage), jax.tree.leaves(problem.after), strict=True):
        bits = np.dtype(f"u{after.dtype.itemsize}")
        np.testing.assert_array_equal(np.asarray(after)[1:].view(bits), np.asarray(target)[1:].view(bits))


def assert_close(out: jax.Array, target: np.ndarray, tolerance: float) -> None:
    """Finite, and no further from the target than this part of its largest value."""
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    assert np.abs(out - target).max() <= tolerance * max(np.abs(target).max(), 1e-30)
