"""Chooses the tiles of a call so that the kernel's memory fits on the chip."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.tiles import TpuLimits
from pallas_kernels.tpu.format import LANES, Format

__all__ = ["Fit", "buffer_bytes", "fit"]

_CHUNK_BLOCKS = 256  # most blocks of a chunk: each is one copy, and they are written out one after another
_SLACK_BYTES = 2 * 2**20  # for what the compiler keeps on the chip beside the named buffers
_LEAST_QUERIES = 16


class Fit(NamedTuple):
    """The tiles of a call."""

    chunk_tokens: int
    tile_queries: int


def buffer_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Bytes of an array on the chip: its last two dimensions are padded to whole tiles, which are small where there are few rows."""
    itemsize = jnp.dtype(dtype).itemsize
    packing = 4 // itemsize  # rows that share the 32 bits of a lane
    rows, lanes = shape[-2:]
    sublanes = min(max(1 << (rows - 1).bit_length(), packing), 8 * packing)
    return math.prod(shape[:-2]) * -(-rows // sublanes) * sublanes * -(-lanes // LANES) * LANES * itemsize


def fit(form: Format, total_bytes: Callable[[Fit], int], limits: TpuLimits, decode: bool) -> Fit | None:
    """The largest chunk that leaves half of the memory free, then the largest tile of queries; None: not even the smallest ones fit.

    Args:
      form: how blocks are stored.
      total_bytes: the kernel's bytes on the chip for given tiles.
      limits: of the device.
      decode: whether all tiles are of one query.
    """
    room = limits.vmem_limit_bytes - _SLACK_BYTES
    least = max(LANES, form.block_size)
    chunk = max(least, min(limits.chunk_tokens, _CHUNK_BLOCKS * form.block_size))
    while chunk > least and total_bytes(Fit(chunk, 1)) > room // 2:
        chunk //= 2
    queries = 1 if decode else limits.tile_queries
    while total_bytes(Fit(chunk, queries)) > room:
        if queries > _LEAST_QUERIES:
            queries //= 2
        elif chunk > least:
            chunk //= 2
        else:
            return None
    return Fit(chunk, queries)
