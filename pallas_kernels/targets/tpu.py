"""TPUs: libtpu carries their whole compiler, and compiles for a described topology with no device at hand."""

import contextlib
import dataclasses
from typing import ClassVar

from jax.experimental import topologies

from pallas_kernels.targets.target import Target

__all__ = ["MXU_ROWS", "TPUS", "TpuTarget"]

MXU_ROWS = 4
"""Rows of bfloat16 that the MXUs of a core take in a cycle: four MXUs one each up to v5p, two MXUs two each since v6e. So many does the
compiler's own table of its units have; with them the data sheets' FLOP/s give the clocks below."""


@dataclasses.dataclass(frozen=True)
class TpuTarget(Target):
    """One TPU generation. Rates are those of one TensorCore, because a schedule is the program of one core."""

    topology_name: str
    """The smallest topology that libtpu describes."""
    mxu_width: int
    """Rows and columns of an MXU."""
    delay_slots: int
    """Bundles that still run behind a branch; seen in dumps, where a region ends so many bundles behind each branch."""

    platform: ClassVar[str] = "tpu"
    packages: ClassVar[tuple[str, ...]] = ("libtpu",)

    @property
    def matrix_flops(self) -> int:
        """bfloat16 FLOPs of all MXUs of a core in a cycle."""
        return 2 * MXU_ROWS * self.mxu_width**2

    @property
    def description(self) -> str:
        """The device and the assumed clock."""
        return f"{self.name}, one core at {self.clock / 1e9:.2f} GHz (assumed)"

    def topology(self) -> topologies.TopologyDescription:
        """The smallest topology of this generation."""
        return topologies.get_topology_desc(topology_name=self.topology_name, platform=self.platform)

    def lowering(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: Pallas asks the mesh what device it is of."""
        return contextlib.nullcontext()


# Data sheets: cloud.google.com/tpu/docs, one page a version. A chip of v4, v5p and 7x has two TensorCores, so their numbers are halved.
# JAX shows a v5p chip as one device of two cores, and each core of v4 (in these topologies) and 7x as a device of its own.
TPUS = (
    TpuTarget("v4", "TPU v4", 1.05e9, 1228e9 / 2, 275e12 / 2, "v4:2x2x1", 128, 1),
    TpuTarget("v5e", "TPU v5 lite", 1.5e9, 819e9, 197e12, "v5e:2x2", 128, 4),
    TpuTarget("v5p", "TPU v5", 1.75e9, 2765e9 / 2, 459e12 / 2, "v5p:2x2x1", 128, 4),
    TpuTarget("v6e", "TPU v6 lite", 1.75e9, 1638e9, 918e12, "v6e:2x2", 256, 4),
    TpuTarget("tpu7x", "TPU7x", 2.2e9, 7380e9 / 2, 2307e12 / 2, "tpu7x:2x2x1", 256, 4),
)
