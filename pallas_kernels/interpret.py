"""Running the kernels on a CPU, for tests: the interpreters simulate copies, barriers and semaphores, and can look for races."""

import contextlib
import contextvars
from collections.abc import Iterator

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

__all__ = ["gpu_interpreter", "interpret_kernels", "interpreting"]

_interpreting: contextvars.ContextVar[plgpu.InterpretGPUParams | None] = contextvars.ContextVar("interpreting", default=None)


@contextlib.contextmanager
def interpret_kernels(params: pltpu.InterpretParams | None = None, gpu_params: plgpu.InterpretGPUParams | None = None) -> Iterator[None]:
    """Within this context, kernels for an accelerator that is not there run through their interpreter, slowly.

    Args:
      params: options of the TPU interpreter; None: its defaults.
      gpu_params: options of the GPU interpreter; None: its defaults.
    """
    token = _interpreting.set(gpu_params or plgpu.InterpretGPUParams())
    try:
        with pltpu.force_tpu_interpret_mode(params or pltpu.InterpretParams()):
            yield
    finally:
        _interpreting.reset(token)


@contextlib.contextmanager
def gpu_interpreter() -> Iterator[None]:
    """Around the call of a GPU kernel: JAX has one mode of interpretation at a time, and `interpret_kernels` leaves it at the TPU's."""
    params = _interpreting.get()
    if params is None:
        yield
        return
    with plgpu.force_gpu_interpret_mode(params):
        yield


def interpreting() -> bool:
    """Whether `interpret_kernels` is in force."""
    return _interpreting.get() is not None
