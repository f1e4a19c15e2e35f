"""How one layer's KV blocks are stored: logical <-> physical, per backend. Nobody else knows the physical shape.

Logically a layer holds keys and values [N, B, K, D]: N blocks of B tokens, K kv heads of width D. Each backend stores them its own way,
as a NamedTuple type of its own. N leads in every array of every layout, so whole blocks are copied, swapped and saved without knowing
the rest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["LAYOUTS", "Storage", "XlaStorage", "copy_blocks", "init_storage", "pack", "sizes", "unpack"]


class XlaStorage(NamedTuple):
    """Keys and values apart, each head's tokens side by side.

    One head of one block is then a contiguous row, the unit in which XLA gathers, and gathered rows come out as the operands of a batched
    matrix product with no transpose between.
    """

    keys: Float[Array, "N K B D"]
    values: Float[Array, "N K B D"]


Storage = XlaStorage

LAYOUTS: dict[str, type[Storage]] = {"xla": XlaStorage}
"""The storage type of each backend. Backends without kernels of their own run through XLA and share its layout."""


def init_storage(backend: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> Storage:
    """Empty storage of one layer.

    Raises:
      NotImplementedError: the backend has no layout.
    """
    if backend not in LAYOUTS:
        raise NotImplementedError(f"no storage layout for backend {backend!r}; there is one for: {', '.join(LAYOUTS)}")
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LAYOUTS[backend](jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class Sizes(NamedTuple):
    """Logical sizes of a layer's storage."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def sizes(storage: Storage) -> Sizes:
    """Reads N, B, K and D off the physical shape."""
    num_blocks, num_kv_heads, block_size, head_dim = storage.keys.shape
    return Sizes(num_blocks, block_size, num_kv_heads, head_dim)


def pack(keys: Float[Array, "N B K D"], values: Float[Array, "N B K D"], backend: str = "xla") -> Storage:
    """Physical storage of a backend from logical blocks."""
    return LAYOUTS[backend](jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2))


def unpack(storage: Storage) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    """Logical keys and values of every block."""
    return jnp.swapaxes(storage.keys, 1, 2), jnp.swapaxes(storage.values, 1, 2)


def copy_blocks(storage: Storage, source: Int[Array, " n"], target: Int[Array, " n"]) -> Storage:
    """Copies whole blocks within a layer; a target outside the pool is dropped."""
    return jax.tree.map(lambda array: array.at[target].set(array[source], mode="drop"), storage)
