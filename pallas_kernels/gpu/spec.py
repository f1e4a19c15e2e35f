"""The static description of a decode kernel, and its buffers in shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["GROUP", "TILE", "Spec", "choose_stages"]

TILE = 64  # tokens that are scored at a time: 16 for each of the four warps
GROUP = 8  # query heads that are scored at a time: the narrowest product of the tensor cores

_BUDGET = 96 * 2**10  # bytes of tiles that leave room for a second program on a multiprocessor
_STAGES = (2, 4)  # fewest and most tiles in flight


class Spec(NamedTuple):
    """What the kernel is built for."""

    block_size: int
    head_dim: int  # as it is stored
    dtype: str
    num_splits: int
    stages: int  # tiles in shared memory: one that is computed, the others on their way
    scale: float
    soft_cap: float | None

    @property
    def piece(self) -> int:
        """Tokens of one copy: a block, or as much of a larger one as fills a tile."""
        return min(self.block_size, TILE)

    @property
    def value_rows(self) -> int:
        """Rows of the product with the values: head_dim, filled up to 16 rows for each of the four warps."""
        return -(-self.head_dim // 64) * 64

    @property
    def swizzle(self) -> int:
        """Bytes of a row of swizzled shared memory, as wide as head_dim allows."""
        return next(width for width in (128, 64, 32) if self.head_dim * jnp.dtype(self.dtype).itemsize % width == 0)

    def scratch(self) -> list:
        """The kernel's buffers: tiles of keys and values, weights, and a barrier for each stage."""
        dtype = jnp.dtype(self.dtype)

        def shared(shape: tuple[int, ...], swizzle: int) -> Any:
            tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))  # type: ignore[abstract]  # JAX's base class lacks a body
            return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]

        return [
            shared((self.stages, TILE, 2 * self.head_dim), self.swizzle),
            shared((GROUP, TILE), 128),
            plgpu.Barrier(num_arrivals=TILE // self.piece, num_barriers=self.stages),
        ]


def choose_stages(head_dim: int, itemsize: int, shared_memory: int) -> int:
    """Tiles in flight for a stored head_dim; 0: not even the fewest fit the shared memory."""
    tile_bytes = TILE * 2 * head_dim * itemsize
    fewest, most = _STAGES
    stages = min(max(_BUDGET // tile_bytes, fewest), most)
    others = GROUP * TILE * itemsize + 2**10  # weights, barriers, and what the compiler aligns
    return stages if stages * tile_bytes + others <= shared_memory else 0
