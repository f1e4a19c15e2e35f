"""What every target has: the rates that its data sheet promises, and how its compiler is told of it."""

import abc
import contextlib
import dataclasses
from typing import ClassVar

from jax.experimental import topologies

__all__ = ["Target"]


@dataclasses.dataclass(frozen=True)
class Target(abc.ABC):
    """A device that kernels are compiled for on a machine without one."""

    name: str
    device_kind: str
    """What JAX calls the device."""
    clock: float
    """Hz, assumed: the one at which the matrix units reach the data sheet's FLOP/s."""
    hbm: float
    """Bytes a second from memory, by the data sheet."""
    flops: float
    """bfloat16 FLOP/s of dense matrix products, by the data sheet."""

    platform: ClassVar[str]
    """What JAX calls this kind of devices."""
    packages: ClassVar[tuple[str, ...]]
    """The distributions that compiling needs besides JAX."""

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes from memory in a cycle of the assumed clock."""
        return self.hbm / self.clock

    @property
    @abc.abstractmethod
    def matrix_flops(self) -> int:
        """bfloat16 FLOPs of all matrix units in a cycle."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """The device and what is assumed of it, in a few words."""

    @abc.abstractmethod
    def topology(self) -> topologies.TopologyDescription:
        """The device as JAX compiles for it."""

    @abc.abstractmethod
    def lowering(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, Pallas lowers for this device."""
