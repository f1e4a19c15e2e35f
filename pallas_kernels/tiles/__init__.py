"""Tile choices of the kernels for each kind of device, as data.

The JSON files beside this module name the devices that are known, with the most memory a kernel may take on the chip and the largest tiles
worth taking there. A TPU that is not named gets the smallest limits of its kind, a GPU those that are named "default". What really fits is
found by a rule from the sizes of a call, and lies with the kernels. `python -m experiments tune_tiles` measures what is best on the GPU at
hand and writes it down here.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

__all__ = ["GpuTiles", "TpuLimits", "gpu_tiles", "tpu_limits", "try_gpu_tiles"]


class TpuLimits(NamedTuple):
    """What a TPU kernel may take."""

    vmem_limit_bytes: int
    chunk_tokens: int  # most context tokens of a step
    tile_queries: int  # most queries of a tile


class GpuTiles(NamedTuple):
    """What the decode kernel of a GPU takes."""

    decode_bytes: int  # of shared memory for tiles, which says how many are in flight
    programs_per_sm: int  # programs that splits are to give each multiprocessor
    fewest_tiles: int  # of a split: fewer do not pay for the merge


_tried: contextvars.ContextVar[GpuTiles | None] = contextvars.ContextVar("tried", default=None)


@functools.cache
def _table(name: str) -> dict[str, dict[str, int]]:
    return json.loads(resources.files(__name__).joinpath(name).read_text(encoding="utf-8"))


@functools.cache
def _tpu_table() -> dict[str, TpuLimits]:
    return {kind: TpuLimits(**limits) for kind, limits in _table("tpu.json").items()}


def gpu_tiles(device_kind: str) -> GpuTiles:
    """The tiles of a kind of GPU, as `jax.Device.device_kind` names it."""
    table = _table("gpu.json")
    return _tried.get() or GpuTiles(**table.get(device_kind, table["default"]))


@contextlib.contextmanager
def try_gpu_tiles(tiles: GpuTiles) -> Iterator[None]:
    """Within this context, kernels of any GPU are built with these tiles: for measuring which are best."""
    token = _tried.set(tiles)
    try:
        yield
    finally:
        _tried.reset(token)


def tpu_limits(device_kind: str) -> TpuLimits:
    """The limits of a kind of TPU, as `jax.Device.device_kind` names it; "interpreter" has small ones, so that small tests cross them."""
    table = _tpu_table()
    if device_kind in table:
        return table[device_kind]
    real = [limits for kind, limits in table.items() if kind != "interpreter"]
    return min(real, key=lambda limits: limits.vmem_limit_bytes)
