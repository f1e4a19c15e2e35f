"""The GPU that kernels are compiled for, as far as they need to know it."""

from typing import NamedTuple

import jax

from pallas_kernels.interpret import interpreting

__all__ = ["Gpu", "find_gpu"]

_SHARED_MEMORY = {9: 232448, 10: 232448, 12: 101376}  # bytes that one program may take, by the major number of the compute capability
_OLDEST = 9  # Hopper: before it there are no tensor copies with a barrier


class Gpu(NamedTuple):
    """What the kernels ask of a device."""

    num_sms: int
    shared_memory: int


_INTERPRETED = Gpu(num_sms=4, shared_memory=_SHARED_MEMORY[9])  # few, so that small tests have one split and large ones several
_DESCRIBED = Gpu(num_sms=132, shared_memory=_SHARED_MEMORY[9])  # an H100, which Mosaic assumes too where there is no device


def find_gpu() -> tuple[Gpu | None, str]:
    """The device, or None and the reason why there is none that the kernels run on."""
    if interpreting():
        return _INTERPRETED, ""
    device = jax.devices()[0]
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind != device.device_kind:  # another machine's, compiled for without one at hand
        is_nvidia = described.device_kind.startswith("NVIDIA")
        return (_DESCRIBED, "") if is_nvidia else (None, f"needs an NVIDIA GPU, the mesh is of {described.device_kind}")
    if not device.device_kind.startswith("NVIDIA"):
        return None, f"needs an NVIDIA GPU, this host has {device.device_kind}; tests run it within jaxpage.interpret_kernels()"
    major = int(device.compute_capability.split(".")[0])
    if major < _OLDEST:
        return None, f"needs compute capability {_OLDEST}.0 or newer, {device.device_kind} has {device.compute_capability}"
    return Gpu(device.core_count, _SHARED_MEMORY.get(major, min(_SHARED_MEMORY.values()))), ""
