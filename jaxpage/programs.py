"""Compiled programs by name and shapes, so that compilations are counted and timed apart from running."""

import contextvars
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

__all__ = ["Call", "Programs"]


class Call(NamedTuple):
    """A pure function with its arguments.

    Attributes:
      function: the function.
      args: pytrees of arrays.
      donate: positions of arguments whose memory the program may reuse.
      options: hashable static keyword arguments.
    """

    function: Callable
    args: tuple
    donate: tuple[int, ...] = ()
    options: Mapping[str, Any] = {}

    @property
    def key(self) -> tuple:
        """What the program depends on."""
        leaves, structure = jax.tree.flatten(self.args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return self.function, structure, shapes, tuple(sorted(self.options.items()))

    def compile(self) -> Any:
        """The program."""
        jitted = jax.jit(lambda *args: self.function(*args, **self.options), donate_argnums=self.donate)
        return jitted.lower(*self.args).compile()


class Programs:
    """Compiles each function once for each set of argument shapes and static options, and runs it.

    Attributes:
      compile_seconds: time spent compiling.
      compiled: the programs made, by `Call.key`.
    """

    def __init__(self) -> None:
        self.compile_seconds = 0.0
        self.compiled: dict[tuple, Any] = {}

    def run(self, function: Callable, *args: Any, donate: tuple[int, ...] = (), **options: Any) -> Any:
        """Calls `function(*args, **options)` as a compiled program; see `Call`."""
        return self.run_call(Call(function, args, donate, options))

    def run_call(self, call: Call) -> Any:
        """Runs a call's program, and compiles it where it is new."""
        key = call.key
        if key not in self.compiled:
            start = time.perf_counter()
            self.compiled[key] = call.compile()
            self.compile_seconds += time.perf_counter() - start
        return self.compiled[key](*call.args)

    def prepare(self, calls: Sequence[Call]) -> None:
        """Compiles the programs of calls that are new, several at a time, and runs none."""
        start = time.perf_counter()
        missing = {key: call for call in calls if (key := call.key) not in self.compiled}
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            # The context tells whether kernels are interpreted.
            made = {key: threads.submit(contextvars.copy_context().run, call.compile) for key, call in missing.items()}
            self.compiled.update({key: each.result() for key, each in made.items()})
        self.compile_seconds += time.perf_counter() - start
