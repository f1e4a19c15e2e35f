"""Times of compiled programs on a device, and the rate of a plain copy there that they are compared with."""

import functools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

__all__ = ["copy_rate", "random_values", "seconds_of"]

_SAMPLES = 3
_SAMPLE_SECONDS = 0.03  # long against the jitter of a launch
_MOST_CALLS = 50


def seconds_of(program: jax.stages.Compiled, *arguments: Any) -> float:
    """Median seconds of a call. Calls of a sample are queued one behind the other, so that the device does not wait for the host."""
    jax.block_until_ready(program(*arguments))  # the first call sets things up
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    calls = min(max(math.ceil(_SAMPLE_SECONDS / (time.perf_counter() - start)), 1), _MOST_CALLS)
    samples = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        for _ in range(calls):
            result = program(*arguments)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples)


def copy_rate(num_bytes: int) -> float:
    """Bytes a second that the device reads and writes, both counted, when it copies so many in one pass of all cores."""
    values = jnp.zeros((num_bytes // 4,), jnp.uint32)
    copy = jax.jit(lambda x: x + 1).lower(values).compile()  # plus one, for a copy alone may be left out
    return 2 * values.nbytes / seconds_of(copy, values)


def random_values(struct: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Values from -1 to 1 that look random, made with no memory besides their own: an array may fill a good part of the device.

    Args:
      struct: shape, at least one axis, and dtype: a float or int8.
      seed: arrays of different seeds differ.
    """
    return _filled(struct.shape, struct.dtype, seed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(shape: tuple[int, ...], dtype: jnp.dtype, seed: Int[Array, ""]) -> Array:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), axis) for axis in (0, 1))
    mixed = (row * jnp.uint32(columns) + column + seed.astype(jnp.uint32)) * jnp.uint32(2654435761)  # Knuth's multiplicative hash
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
    whole = (mixed >> 24).astype(jnp.float32) - 127.5
    return (whole if dtype == jnp.int8 else whole / 127.5).astype(dtype).reshape(shape)
