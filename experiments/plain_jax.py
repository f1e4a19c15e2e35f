"""Running where there is JAX and NumPy and nothing else, as on a rented machine."""

import importlib.util
import sys
import types
from typing import Any

import jax

__all__ = ["without_jaxtyping"]


class _AnyShape:
    """`Float[Array, "S M"]` and the like, which only a reader looks at."""

    def __class_getitem__(cls, item: Any) -> Any:
        return Any


def without_jaxtyping() -> None:
    """Puts a stand-in where jaxtyping is not installed: here it serves annotations only. Call it before the package is imported."""
    if importlib.util.find_spec("jaxtyping") is None:
        stand_in = types.ModuleType("jaxtyping")
        vars(stand_in).update({"Array": jax.Array, "__getattr__": lambda name: _AnyShape})
        sys.modules["jaxtyping"] = stand_in
