"""The static description of a kernel, and its buffers in shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

__all__ = ["GROUP", "ROWS", "KvBuffers", "Spec", "choose_decode", "choose_prefill", "copy_fault", "is_staged"]

GROUP = 8  # query heads that decode scores at a time: the narrowest product of the tensor cores
ROWS = 64  # query rows that prefill scores at a time: 16 for each of the four warps

_SWIZZLED_ROWS = 8  # a swizzle is a pattern over so many rows: copies of fewer cannot follow it
_ALIGNMENT = 128  # bytes: where a copy to shared memory may begin
_DECODE_TILE = 64  # tokens: 16 for each of the four warps
_DECODE_BUDGET = 96 * 2**10  # bytes of tiles that leave room for a second program on a multiprocessor
_DECODE_STAGES = (2, 4)  # fewest and most tiles in flight
_PREFILL_TILES = (64, 32, 16)  # tokens
_PREFILL_STAGES = 2
_PREFILL_AREA = 64 * 128  # most elements of the keys of a tile: the sums of wider heads leave fewer registers
_OVERHEAD = 3 * 2**10  # barriers, and what the compiler aligns: 2072 bytes were seen


class KvBuffers(NamedTuple):
    """Keys and values of a head, side by side, in shared memory."""

    tiles: Any  # [stages, tile, 2*D], as they arrive
    staged: Any | None  # [tile, 2*D], for the tensor cores; None: they take tiles as they arrive
    arrived: Any | None  # barriers [stages]; None: copies are not counted


class Spec(NamedTuple):
    """What a kernel is built for."""

    block_size: int
    head_dim: int  # as it is stored
    dtype: str  # as it is stored
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
    def operand(self) -> Any:
        """The dtype that the tensor cores take."""
        return jnp.dtype(jnp.bfloat16 if _is_narrow(self.dtype) else self.dtype)

    @property
    def value_rows(self) -> int:
        """Rows of decode's product with the values: head_dim, filled up to 16 rows for each of the four warps."""
        return -(-self.head_dim // 64) * 64

    @property
    def swizzle(self) -> int:
        """Bytes of a row of swizzled shared memory, as wide as head_dim allows."""
        return _swizzle(self.head_dim * self.operand.itemsize, widest=64 if _is_narrow(self.dtype) else 128)

    @property
    def lanes(self) -> int:
        """Elements of such a row."""
        return self.swizzle // self.operand.itemsize

    @property
    def arriving_lanes(self) -> int:
        """Elements of such a row in a tile as it arrives."""
        return _kv_swizzle(self.head_dim, self.dtype) // jnp.dtype(self.dtype).itemsize

    def shared(self, shape: tuple[int, ...], swizzle: int) -> Any:
        """A buffer in shared memory that the tensor cores read without conflicts."""
        return _swizzled(shape, self.operand, swizzle)

    def kv_buffers(self) -> KvBuffers:
        """The buffers for keys and values."""
        shape, dtype = (self.stages, self.tile, 2 * self.head_dim), jnp.dtype(self.dtype)
        swizzles = self.block_size >= _SWIZZLED_ROWS
        tiles = _swizzled(shape, dtype, _kv_swizzle(self.head_dim, dtype)) if swizzles else plgpu.SMEM(shape, dtype)
        staged = self.shared((self.tile, 2 * self.head_dim), self.swizzle) if is_staged(self.block_size, dtype) else None
        return KvBuffers(tiles, staged, plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.stages) if self.counted else None)


def is_staged(block_size: int, dtype: DTypeLike) -> bool:
    """Whether tiles do not arrive as the tensor cores take them: in 8 bits, or in rows that follow no swizzle."""
    return _is_narrow(dtype) or block_size < _SWIZZLED_ROWS


def _is_narrow(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).itemsize == 1


def _swizzle(row_bytes: int, widest: int = 128) -> int:
    return next(width for width in (128, 64, 32) if width <= widest and row_bytes % width == 0)


def _kv_swizzle(head_dim: int, dtype: DTypeLike) -> int:
    """Of tiles as they arrive. The tensor cores take keys and values apart; the staging of 8-bit values takes both, in small parts."""
    return _swizzle(2 * head_dim, widest=64) if _is_narrow(dtype) else _swizzle(head_dim * jnp.dtype(dtype).itemsize)


def _swizzled(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int) -> Any:
    tiling = plgpu.TilingTransform((_SWIZZLED_ROWS, swizzle // dtype.itemsize))  # type: ignore[abstract]  # JAX's base class lacks a body
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def choose_decode(block_size: int, head_dim: int, dtype: DTypeLike, shared_memory: int) -> tuple[int, int]:
    """(tile, stages) of decode for a stored head_dim; no stages: not even the fewest fit the shared memory."""
    fewest, most = _DECODE_STAGES
    tile_bytes, other_bytes = _tile_bytes(block_size, head_dim, dtype, _DECODE_TILE)
    other_bytes += GROUP * _DECODE_TILE * 2
    stages = min(max(_DECODE_BUDGET // tile_bytes, fewest), most)
    return _DECODE_TILE, stages if stages * tile_bytes + other_bytes <= shared_memory else 0


def choose_prefill(block_size: int, head_dim: int, dtype: DTypeLike, shared_memory: int) -> tuple[int, int]:
    """(tile, stages) of prefill, likewise."""
    for tile in _PREFILL_TILES:
        tile_bytes, other_bytes = _tile_bytes(block_size, head_dim, dtype, tile)
        other_bytes += ROWS * (head_dim + tile) * 2  # queries and weights
        if tile * head_dim <= _PREFILL_AREA and _PREFILL_STAGES * tile_bytes + other_bytes <= shared_memory:
            return tile, _PREFILL_STAGES
    return 0, 0


def copy_fault(block_size: int, head_dim: int, dtype: DTypeLike, tile: int, counted: bool) -> str:
    """Why a head of a block cannot be copied to a tile; empty: it can."""
    row_bytes = 2 * head_dim * jnp.dtype(dtype).itemsize
    if block_size < _SWIZZLED_ROWS:
        if not counted:
            return f"works with block sizes from {_SWIZZLED_ROWS} on before Hopper, not {block_size}"
        if block_size * row_bytes % _ALIGNMENT:
            return f"needs keys and values of a block to fill multiples of {_ALIGNMENT} bytes a head, not {block_size} x {row_bytes}"
    elif not counted and min(block_size, tile) // _SWIZZLED_ROWS * (row_bytes // _kv_swizzle(head_dim, dtype)) % 4:
        return f"copies before Hopper occupy four warps: head_dim {head_dim} in {jnp.dtype(dtype).name} works with larger blocks"
    return ""


def _tile_bytes(block_size: int, head_dim: int, dtype: DTypeLike, tile: int) -> tuple[int, int]:
    """Bytes of keys and values in a tile, and of what there is beside the tiles in flight."""
    elements = tile * 2 * head_dim
    return elements * jnp.dtype(dtype).itemsize, _OVERHEAD + (elements * 2 if is_staged(block_size, dtype) else 0)
