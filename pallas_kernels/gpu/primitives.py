"""Operations of Mosaic GPU that its interpreter lacks or that JAX's releases spell differently. No other module knows the difference."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Num

from pallas_kernels.interpret import interpreting

__all__ = ["copy", "mma", "store", "widen"]


def mma(total: Float[Array, "M N"], left: Float[Array, "M D"], right: Float[Array, "D N"]) -> Float[Array, "M N"]:
    """total + left @ right on the tensor cores; operands in 16 bits, the sum in float32."""
    if interpreting():
        return total + jax.lax.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(total, left, right)


def copy(source: Any, target: Any, barrier: Any | None) -> None:
    """Starts a copy from global to shared memory that arrives at a barrier; without one, as before Hopper, as a group of its own."""
    if barrier is None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def widen(value: Num[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """The same values in 16 bits."""
    if value.dtype.itemsize == 1:  # no GPU before Hopper converts them to bfloat16 at once
        value = value.astype(jnp.float16).astype(jnp.float32)
    return value.astype(dtype)


def store(ref: Any, value: Array) -> None:
    """Stores a result in global memory, also one that fills no whole lines of 128 bytes."""
    if interpreting() or not hasattr(plgpu, "store"):  # up to JAX 0.11 any store may be such a one
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)
