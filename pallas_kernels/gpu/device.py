"""The GPU that kernels are compiled for, as far as they need to know it."""

from typing import NamedTuple

import jax

from pallas_kernels.interpret import interpreting

__all__ = ["Gpu", "find_gpu"]

_SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "10.3": 232448, "12.0": 101376}
"""Bytes that one program may take, by the compute capability."""
_OLDEST = 8  # Ampere: before it there are no copies past the registers
_COUNTED = 9  # Hopper
_FLOAT8 = (8, 9)  # Ada


class Gpu(NamedTuple):
    """What the kernels ask of a device."""

    num_sms: int
    shared_memory: int
    counted_copies: bool  # copies of whole tensors, which report to a barrier when they arrive
    has_float8: bool = True  # instructions that convert it


_INTERPRETED = Gpu(4, _SHARED_MEMORY["9.0"], True)  # few multiprocessors: small tests have one split, large ones several
_DESCRIBED = {  # by a word of the device's kind: a description of a device does not tell its compute capability
    "A100": Gpu(108, _SHARED_MEMORY["8.0"], False, has_float8=False),
    "L4": Gpu(58, _SHARED_MEMORY["8.9"], False),
    "H100": Gpu(132, _SHARED_MEMORY["9.0"], True),
    "H200": Gpu(132, _SHARED_MEMORY["9.0"], True),
    "B200": Gpu(148, _SHARED_MEMORY["10.0"], True),
    "RTX PRO 6000": Gpu(188, _SHARED_MEMORY["12.0"], True),
}


def find_gpu() -> tuple[Gpu | None, str]:
    """The device, or None and the reason why there is none that the kernels run on."""
    if interpreting():
        return _INTERPRETED, ""
    device = jax.devices()[0]
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind != device.device_kind:  # another machine's, compiled for without one at hand
        known = next((gpu for word, gpu in _DESCRIBED.items() if word in described.device_kind), None)
        return known, "" if known else f"needs an NVIDIA GPU that is known, the mesh is of {described.device_kind}"
    if not device.device_kind.startswith("NVIDIA"):
        return None, f"needs an NVIDIA GPU, this host has {device.device_kind}; tests run it within jaxpage.interpret_kernels()"
    major, minor = map(int, device.compute_capability.split("."))
    if major < _OLDEST:
        return None, f"needs compute capability {_OLDEST}.0 or newer, {device.device_kind} has {device.compute_capability}"
    shared_memory = _SHARED_MEMORY.get(device.compute_capability, min(_SHARED_MEMORY.values()))
    return Gpu(device.core_count, shared_memory, major >= _COUNTED, (major, minor) >= _FLOAT8), ""
