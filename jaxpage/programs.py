"""Compiled programs by name and shapes, so that compilations are counted and timed apart from running."""

import time
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["Programs"]


class Programs:
    """Compiles each function once for each set of argument shapes and static options, and runs it.

    Attributes:
      compile_seconds: time spent compiling.
      compiled: the programs made, by (name, shapes, options).
    """

    def __init__(self) -> None:
        self.compile_seconds = 0.0
        self.compiled: dict[tuple, Any] = {}

    def run(self, function: Callable, *args: Any, donate: tuple[int, ...] = (), **options: Any) -> Any:
        """Calls `function(*args, **options)` as a compiled program.

        Args:
          function: a pure function.
          args: pytrees of arrays.
          donate: positions of arguments whose memory the program may reuse.
          options: hashable static keyword arguments.
        """
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, jax.numpy.dtype(leaf.dtype)) for leaf in leaves)
        key = (function, structure, shapes, tuple(sorted(options.items())))
        if key not in self.compiled:
            start = time.perf_counter()
            jitted = jax.jit(lambda *args: function(*args, **options), donate_argnums=donate)
            self.compiled[key] = jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - start
        return self.compiled[key](*args)
