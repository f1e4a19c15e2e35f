"""Running the kernels on a CPU, for tests: the TPU interpreter simulates copies and semaphores, and can look for races."""

import contextlib
import contextvars
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

__all__ = ["interpret_kernels", "interpreting"]

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpret_kernels(params: pltpu.InterpretParams | None = None) -> Iterator[None]:
    """Within this context, kernels for an accelerator that is not there run through their interpreter, slowly.

    Args:
      params: options of the TPU interpreter; None: its defaults.
    """
    token = _interpreting.set(True)
    try:
        with pltpu.force_tpu_interpret_mode(params or pltpu.InterpretParams()):
            yield
    finally:
        _interpreting.reset(token)


def interpreting() -> bool:
    """Whether `interpret_kernels` is in force."""
    return _interpreting.get()
