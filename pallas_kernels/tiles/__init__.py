"""Tile choices of the kernels for each kind of device, as data.

The JSON files beside this module name the devices that are known, with the most memory a kernel may take on the chip and the largest tiles
worth taking there. A device that is not named gets the smallest limits of its kind. What really fits is found by a rule from the sizes of
a call, and lies with the kernels.
"""

import functools
import json
from importlib import resources
from typing import NamedTuple

__all__ = ["TpuLimits", "tpu_limits"]


class TpuLimits(NamedTuple):
    """What a TPU kernel may take."""

    vmem_limit_bytes: int
    chunk_tokens: int  # most context tokens of a step
    tile_queries: int  # most queries of a tile


@functools.cache
def _tpu_table() -> dict[str, TpuLimits]:
    text = resources.files(__name__).joinpath("tpu.json").read_text(encoding="utf-8")
    return {kind: TpuLimits(**limits) for kind, limits in json.loads(text).items()}


def tpu_limits(device_kind: str) -> TpuLimits:
    """The limits of a kind of TPU, as `jax.Device.device_kind` names it; "interpreter" has small ones, so that small tests cross them."""
    table = _tpu_table()
    if device_kind in table:
        return table[device_kind]
    real = [limits for kind, limits in table.items() if kind != "interpreter"]
    return min(real, key=lambda limits: limits.vmem_limit_bytes)
