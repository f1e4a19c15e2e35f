"""NVIDIA GPUs: JAX's CUDA plugin compiles for a described device with none at hand, and NVIDIA's ptxas says what a kernel takes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, NamedTuple
from unittest import mock

from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils as mosaic

from pallas_kernels.targets.target import Target

__all__ = ["GPUS", "GpuTarget"]

REGISTERS = 65536
"""Registers of a multiprocessor, of 32 bits, in every generation since Kepler."""
WARP = 32
_PARTITIONS = 4  # of a multiprocessor; each has a quarter of the registers
_REGISTER_UNIT = 256  # registers are handed to warps in such units
_SHARED_UNIT = 128  # bytes; shared memory is handed to programs in such units
_SHARED_RESERVED = 1024  # bytes that CUDA takes of each program


class Architecture(NamedTuple):
    """What all GPUs of one compute capability share."""

    capability: tuple[int, int]
    sm_shared_memory: int
    """Bytes of shared memory of a multiprocessor."""
    shared_memory: int
    """Bytes of shared memory that one program may take."""
    sm_threads: int
    """Threads that a multiprocessor holds."""
    sm_programs: int
    """Programs that a multiprocessor holds."""
    sm_matrix_flops: int
    """bfloat16 FLOPs of the tensor cores of a multiprocessor in a cycle."""


@dataclasses.dataclass(frozen=True)
class GpuTarget(Target):
    """One kind of GPU. Rates are those of the whole chip."""

    fp8_flops: float | None
    """FLOP/s of dense matrix products in 8-bit floats, by the data sheet; None: it has none."""
    architecture: Architecture
    num_sms: int
    """Multiprocessors."""
    l2_bytes: int
    memory_bytes: int

    platform: ClassVar[str] = "gpu"
    packages: ClassVar[tuple[str, ...]] = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")

    @property
    def matrix_flops(self) -> int:
        """bfloat16 FLOPs of all tensor cores in a cycle."""
        return self.num_sms * self.architecture.sm_matrix_flops

    @property
    def description(self) -> str:
        """The device, its multiprocessors and the assumed clock."""
        return f"{self.name}, {self.num_sms} SMs at {self.clock / 1e9:.2f} GHz (assumed)"

    def topology(self) -> topologies.TopologyDescription:
        """One GPU of this kind."""
        return topologies.get_topology_desc(topology_name=self.device_kind, platform="cuda", topology="1x1x1", target_config=self._config())

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        """Mosaic asks devices for their compute capability, which a described one does not tell; it takes that for a Hopper."""
        with mock.patch.object(mosaic, "_infer_arch", lambda: self.architecture.capability):
            yield

    def occupancy(self, threads: int, registers: int, shared_bytes: int) -> float:
        """Share of a multiprocessor's threads that programs fill, by the rules of NVIDIA's occupancy calculator.

        Args:
          threads: of one program.
          registers: of each thread.
          shared_bytes: of one program.
        """
        architecture = self.architecture
        warps = -(-threads // WARP)
        warp_registers = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        shared = -(-(shared_bytes + _SHARED_RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
        programs = min(
            architecture.sm_threads // (warps * WARP),
            REGISTERS // _PARTITIONS // max(warp_registers, 1) * _PARTITIONS // warps,
            architecture.sm_shared_memory // shared,
            architecture.sm_programs,
        )
        return programs * warps * WARP / architecture.sm_threads

    def _config(self) -> str:
        """XLA's GpuTargetConfigProto as text."""
        architecture = self.architecture
        major, minor = architecture.capability
        extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # wgmma and its successors
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: {WARP} fpus_per_core: {64 if architecture.capability == (8, 0) else 128}
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {architecture.shared_memory}
              shared_memory_per_core: {architecture.sm_shared_memory} threads_per_core_limit: {architecture.sm_threads}
              core_count: {self.num_sms}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {int(self.hbm)} l2_cache_size: {self.l2_bytes} device_memory_size: {self.memory_bytes}
              clock_rate_ghz: {self.clock / 1e9} registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
              cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.device_kind}"
        """


_MIB, _GIB = 2**20, 2**30

# CUDA C++ Programming Guide, "Technical specifications per compute capability"; FLOPs: white papers of the generations.
_AMPERE = Architecture((8, 0), 164 * 1024, 163 * 1024, 2048, 32, 2048)
_ADA = Architecture((8, 9), 100 * 1024, 99 * 1024, 1536, 24, 1024)
_HOPPER = Architecture((9, 0), 228 * 1024, 227 * 1024, 2048, 32, 4096)
_BLACKWELL = Architecture((10, 0), 228 * 1024, 227 * 1024, 2048, 32, 8192)
_BLACKWELL_RTX = Architecture((12, 0), 100 * 1024, 99 * 1024, 1536, 24, 1024)

# NVIDIA's data sheets, one a product: SXM modules of A100, H100 and H200, one B200 of a DGX. FLOP/s are without sparsity.
GPUS = (
    GpuTarget("a100", "NVIDIA A100-SXM4-80GB", 1.41e9, 2039e9, 312e12, None, _AMPERE, 108, 40 * _MIB, 80 * _GIB),
    GpuTarget("l4", "NVIDIA L4", 2.04e9, 300e9, 121e12, 242e12, _ADA, 58, 48 * _MIB, 24 * _GIB),
    GpuTarget("h100", "NVIDIA H100 80GB HBM3", 1.83e9, 3350e9, 989.4e12, 1979e12, _HOPPER, 132, 50 * _MIB, 80 * _GIB),
    GpuTarget("h200", "NVIDIA H200", 1.83e9, 4800e9, 989.4e12, 1979e12, _HOPPER, 132, 50 * _MIB, 141 * _GIB),
    GpuTarget("b200", "NVIDIA B200", 1.856e9, 8000e9, 2250e12, 4500e12, _BLACKWELL, 148, 126 * _MIB, 180 * _GIB),
    GpuTarget(
        "rtx-pro-6000",
        *("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 2.617e9, 1792e9, 503.8e12, 1007.6e12),
        *(_BLACKWELL_RTX, 188, 128 * _MIB, 96 * _GIB),
    ),
)
