"""The static description of a kernel, and its buffers in shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["GROUP", "ROWS", "Spec", "choose_decode", "choose_prefill"]

GROUP = 8  # query heads that decode scores at a time: the narrowest product of the tensor cores
ROWS = 64  # query rows that prefill scores at a time: 16 for each of the four warps

_DECODE_TILE = 64  # tokens: 16 for each of the four warps
_DECODE_BUDGET = 96 * 2**10  # bytes of tiles that leave room for a second program on a multiprocessor
_DECODE_STAGES = (2, 4)  # fewest and most tiles in flight
_PREFILL_TILES = (64, 32, 16)  # tokens
_PREFILL_STAGES = 2
_PREFILL_AREA = 64 * 128  # most elements of the keys of a tile: the sums of wider heads leave fewer registers
_OVERHEAD = 2**10  # barriers, and what the compiler aligns


class Spec(NamedTuple):
    """What a kernel is built for."""

    block_size: int
    head_dim: int  # as it is stored
    dtype: str
    tile: int  # tokens that are scored at a time
    stages: int  # tiles in shared memory: one that is computed, the others on their way
    scale: float
    soft_cap: float | None
    window: int | None
    counted: bool  # copies report to a barrier; before Hopper they are waited for in the order of their start

    @property
    def piece(self) -> int:
        """Tokens of one copy: a block, or as much of a larger one as fills a tile."""
        return min(self.block_size, self.tile)

    @property
    def pieces(self) -> int:
        """Copies that fill a tile."""
        return self.tile // self.piece

    @property
    def value_rows(self) -> int:
        """Rows of decode's product with the values: head_dim, filled up to 16 rows for each of the four warps."""
        return -(-self.head_dim // 64) * 64

    @property
    def swizzle(self) -> int:
        """Bytes of a row of swizzled shared memory, as wide as head_dim allows."""
        return next(width for width in (128, 64, 32) if self.head_dim * jnp.dtype(self.dtype).itemsize % width == 0)

    def shared(self, shape: tuple[int, ...], swizzle: int) -> Any:
        """A buffer in shared memory that the tensor cores read without conflicts."""
        dtype = jnp.dtype(self.dtype)
        tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # type: ignore[abstract]  # JAX's base class lacks a body
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]

    def kv_tiles(self) -> Any:
        """Keys and values of the tiles in flight, side by side."""
        return self.shared((self.stages, self.tile, 2 * self.head_dim), self.swizzle)

    def arrived(self) -> list:
        """A barrier for each tile in flight, if copies are counted."""
        return [plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages)] if self.counted else []


def choose_decode(head_dim: int, itemsize: int, shared_memory: int) -> tuple[int, int]:
    """(tile, stages) of decode for a stored head_dim; no stages: not even the fewest fit the shared memory."""
    tile_bytes = _DECODE_TILE * 2 * head_dim * itemsize
    fewest, most = _DECODE_STAGES
    stages = min(max(_DECODE_BUDGET // tile_bytes, fewest), most)
    weights = GROUP * _DECODE_TILE * itemsize
    return _DECODE_TILE, stages if stages * tile_bytes + weights + _OVERHEAD <= shared_memory else 0


def choose_prefill(head_dim: int, itemsize: int, shared_memory: int) -> tuple[int, int]:
    """(tile, stages) of prefill, likewise."""
    for tile in _PREFILL_TILES:
        tiles = _PREFILL_STAGES * tile * 2 * head_dim * itemsize
        queries_and_weights = ROWS * (head_dim + tile) * itemsize
        if tile * head_dim <= _PREFILL_AREA and tiles + queries_and_weights + _OVERHEAD <= shared_memory:
            return tile, _PREFILL_STAGES
    return 0, 0
