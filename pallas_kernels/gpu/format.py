"""How keys and values of one block lie in a GPU's memory.

A block is [B, 2K, D]: each token's heads side by side, keys at even places and values at odd ones, so that one copy of B rows brings the
keys and the values of one head. Heads are padded to whole rows of the shared memory's swizzle: 16 elements, and no fewer than 32. So
head_dim 64, 80, 96, 128 and 256 are stored as they are.

8-bit values may have a bfloat16 scale for each token and head. Scales lie apart, [2K, B] for each block: within the rows they would take
more room than they need, because copies begin at multiples of 16 bytes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

__all__ = ["DTYPES", "GpuStorage", "empty", "encode", "pack", "stored_dim", "unpack"]

DTYPES = ("bfloat16", "float16", "int8", "float8_e4m3fn")
_ROW = 16  # elements of 16 bits in the narrowest swizzle, 32 bytes
_SCALE = jnp.bfloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GpuStorage:
    """One layer's blocks. `head_dim` is the logical one: static data of the pytree, because the stored one may be padded."""

    blocks: Num[Array, "N B 2*K stored_dim"]
    head_dim: int = dataclasses.field(metadata={"static": True})
    scales: Float[Array, "N 2*K B"] | None = None
    """Of 8-bit values that have them: what is stored times its scale is what is meant."""


def stored_dim(head_dim: int) -> int:
    """What a head's width is padded to."""
    return max(-(-head_dim // _ROW), 2) * _ROW


def empty(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, scaled: bool) -> GpuStorage:
    """Storage of zeros."""
    blocks = jnp.zeros((num_blocks, block_size, 2 * num_kv_heads, stored_dim(head_dim)), dtype)
    return GpuStorage(blocks, head_dim, jnp.zeros((num_blocks, 2 * num_kv_heads, block_size), _SCALE) if scaled else None)


def encode(
    keys: Float[Array, "*tokens K D"], values: Float[Array, "*tokens K D"], dtype: DTypeLike, scaled: bool
) -> tuple[Num[Array, "*tokens 2*K stored_dim"], Float[Array, "*tokens 2*K"] | None]:
    """What is stored for some keys and values: keys at even heads, values at odd ones, padded with zeros, and their scales."""
    *tokens, num_kv_heads, head_dim = keys.shape
    heads = jnp.stack([keys, values], axis=-2).reshape(*tokens, 2 * num_kv_heads, head_dim)
    scales = None
    if jnp.dtype(dtype).itemsize == 1:
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        largest = 127.0 if is_integer else float(jnp.finfo(dtype).max)
        heads = heads.astype(jnp.float32)
        if scaled:
            # Rounded up to bfloat16, so that the largest value does not overflow; a token of zeros needs a scale too.
            scales = jnp.max(jnp.abs(heads), axis=-1) * ((1 + 2**-7) / largest)
            scales = jnp.maximum(scales, 1e-30).astype(_SCALE)
            heads = heads / scales.astype(jnp.float32)[..., None]
        heads = jnp.clip(heads, -largest, largest)
        heads = jnp.round(heads) if is_integer else heads
    heads = jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, stored_dim(head_dim) - head_dim)])
    return heads.astype(dtype), scales


def pack(keys: Float[Array, "N B K D"], values: Float[Array, "N B K D"], dtype: DTypeLike, scaled: bool) -> GpuStorage:
    """Storage from logical blocks."""
    blocks, scales = encode(keys, values, dtype, scaled)
    return GpuStorage(blocks, keys.shape[-1], None if scales is None else jnp.swapaxes(scales, 1, 2))


def unpack(storage: GpuStorage) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    """Logical keys and values of every block, 8-bit ones in float32."""
    heads = storage.blocks[..., : storage.head_dim]
    if heads.dtype.itemsize == 1:
        heads = heads.astype(jnp.float32)
    if storage.scales is not None:
        heads *= jnp.swapaxes(storage.scales, 1, 2).astype(jnp.float32)[..., None]
    return heads[:, :, 0::2], heads[:, :, 1::2]
