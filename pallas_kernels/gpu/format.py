"""How keys and values of one block lie in a GPU's memory.

A block is [B, 2K, D]: each token's heads side by side, keys at even places and values at odd ones, so that one copy of B rows brings the
keys and the values of one head. Heads are padded to whole rows of the shared memory's swizzle: 16 elements, and no fewer than 32. So
head_dim 64, 80, 96, 128 and 256 are stored as they are.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["DTYPES", "GpuStorage", "block_shape", "interleave", "pack", "stored_dim", "unpack"]

DTYPES = ("bfloat16", "float16")
_ROW = 16  # elements of 16 bits in the narrowest swizzle, 32 bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GpuStorage:
    """One layer's blocks. `head_dim` is the logical one: static data of the pytree, because the stored one may be padded."""

    blocks: Float[Array, "N B 2*K stored_dim"]
    head_dim: int = dataclasses.field(metadata={"static": True})


def stored_dim(head_dim: int) -> int:
    """What a head's width is padded to."""
    return max(-(-head_dim // _ROW), 2) * _ROW


def block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Physical shape of one block."""
    return block_size, 2 * num_kv_heads, stored_dim(head_dim)


def interleave(keys: Float[Array, "*tokens K D"], values: Float[Array, "*tokens K D"]) -> Float[Array, "*tokens 2*K stored_dim"]:
    """Keys at even heads, values at odd ones, each padded with zeros."""
    *tokens, num_kv_heads, head_dim = keys.shape
    heads = jnp.stack([keys, values], axis=-2).reshape(*tokens, 2 * num_kv_heads, head_dim)
    return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, stored_dim(head_dim) - head_dim)])


def pack(keys: Float[Array, "N B K D"], values: Float[Array, "N B K D"], dtype: str) -> GpuStorage:
    """Storage from logical blocks."""
    return GpuStorage(interleave(keys.astype(dtype), values.astype(dtype)), keys.shape[-1])


def unpack(storage: GpuStorage) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    """Logical keys and values of every block."""
    heads = storage.blocks[..., : storage.head_dim]
    return heads[:, :, 0::2], heads[:, :, 1::2]
