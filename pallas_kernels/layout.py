"""How one layer's KV blocks are stored: logical <-> physical, per backend. Nobody else knows the physical shape.

Logically a layer holds keys and values [N, B, K, D]: N blocks of B tokens, K kv heads of width D. Each backend stores them its own way,
as a type of its own. N leads in every array of every layout, so whole blocks are copied, swapped and saved without knowing the rest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import format as gpu_format
from pallas_kernels.gpu.format import GpuStorage
from pallas_kernels.tpu import format as tpu_format
from pallas_kernels.tpu.format import TpuStorage

__all__ = [
    "LAYOUTS",
    "GpuStorage",
    "Layout",
    "Sizes",
    "Storage",
    "TpuStorage",
    "XlaStorage",
    "copy_blocks",
    "init_storage",
    "pack",
    "sizes",
    "unpack",
]


class XlaStorage(NamedTuple):
    """Keys and values apart, each head's tokens side by side.

    One head of one block is then a contiguous row, the unit in which XLA gathers, and gathered rows come out as the operands of a batched
    matrix product with no transpose between.
    """

    keys: Float[Array, "N K B D"]
    values: Float[Array, "N K B D"]


Storage = XlaStorage | TpuStorage | GpuStorage


class Sizes(NamedTuple):
    """Logical sizes of a layer's storage."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


class Layout(NamedTuple):
    """A backend's storage: its type, what it holds, and the way there and back."""

    storage: type
    dtypes: tuple[str, ...]
    empty: Callable[[Sizes, str, bool], Storage]  # (sizes, dtype, scaled)
    pack: Callable[[Array, Array, str, bool], Storage]  # (keys, values, dtype, scaled)
    unpack: Callable[[Any], tuple[Array, Array]]
    sizes: Callable[[Any], Sizes]


def _xla_empty(sizes: Sizes, dtype: str, scaled: bool) -> XlaStorage:
    shape = (sizes.num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    return XlaStorage(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _xla_pack(keys: Float[Array, "N B K D"], values: Float[Array, "N B K D"], dtype: str, scaled: bool) -> XlaStorage:
    return XlaStorage(*(jnp.swapaxes(side, 1, 2).astype(dtype) for side in (keys, values)))


def _xla_unpack(storage: XlaStorage) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    return jnp.swapaxes(storage.keys, 1, 2), jnp.swapaxes(storage.values, 1, 2)


def _xla_sizes(storage: XlaStorage) -> Sizes:
    num_blocks, num_kv_heads, block_size, head_dim = storage.keys.shape
    return Sizes(num_blocks, block_size, num_kv_heads, head_dim)


def _tpu_empty(sizes: Sizes, dtype: str, scaled: bool) -> TpuStorage:
    form = tpu_format.Format(sizes.block_size, sizes.num_kv_heads, sizes.head_dim, dtype, scaled)
    return TpuStorage(jnp.zeros((sizes.num_blocks, *form.block_shape), form.storage_dtype), form)


def _tpu_pack(keys: Float[Array, "N B K D"], values: Float[Array, "N B K D"], dtype: str, scaled: bool) -> TpuStorage:
    _, block_size, num_kv_heads, head_dim = keys.shape
    form = tpu_format.Format(block_size, num_kv_heads, head_dim, dtype, scaled)
    return TpuStorage(tpu_format.pack(keys, values, form), form)


def _tpu_unpack(storage: TpuStorage) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    return tpu_format.unpack(storage.blocks, storage.form)


def _tpu_sizes(storage: TpuStorage) -> Sizes:
    return Sizes(storage.blocks.shape[0], *storage.form[:3])


def _gpu_empty(sizes: Sizes, dtype: str, scaled: bool) -> GpuStorage:
    return gpu_format.empty(*sizes, dtype, scaled)


def _gpu_sizes(storage: GpuStorage) -> Sizes:
    num_blocks, block_size, heads, _ = storage.blocks.shape
    return Sizes(num_blocks, block_size, heads // 2, storage.head_dim)


LAYOUTS: dict[str, Layout] = {
    "xla": Layout(XlaStorage, ("float32", "bfloat16", "float16"), _xla_empty, _xla_pack, _xla_unpack, _xla_sizes),
    "tpu": Layout(TpuStorage, tpu_format.DTYPES, _tpu_empty, _tpu_pack, _tpu_unpack, _tpu_sizes),
    "gpu": Layout(GpuStorage, gpu_format.DTYPES, _gpu_empty, gpu_format.pack, gpu_format.unpack, _gpu_sizes),
}
"""The layout of each backend. Backends without kernels of their own run through XLA and share its layout."""


def _named(backend: str, dtype: str, scaled: bool) -> Layout:
    if backend not in LAYOUTS:
        raise NotImplementedError(f"no storage layout for backend {backend!r}; there is one for: {', '.join(LAYOUTS)}")
    if scaled and jnp.dtype(dtype).itemsize != 1:
        raise ValueError(f"only 8-bit dtypes have scales, not {dtype}")
    if dtype not in LAYOUTS[backend].dtypes:
        raise NotImplementedError(f"the {backend} layout does not hold {dtype}; it holds: {', '.join(LAYOUTS[backend].dtypes)}")
    return LAYOUTS[backend]


def _of(storage: Storage) -> Layout:
    return next(layout for layout in LAYOUTS.values() if isinstance(storage, layout.storage))


def init_storage(
    backend: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, scaled: bool = False
) -> Storage:
    """Empty storage of one layer. `scaled`: an 8-bit dtype with a scale for each token and head.

    Raises:
      NotImplementedError: the backend has no layout, or its layout does not hold this dtype.
      ValueError: `scaled` with a dtype of more than 8 bits.
    """
    dtype = jnp.dtype(dtype).name
    return _named(backend, dtype, scaled).empty(Sizes(num_blocks, block_size, num_kv_heads, head_dim), dtype, scaled)


def sizes(storage: Storage) -> Sizes:
    """Reads N, B, K and D off a layer's storage."""
    return _of(storage).sizes(storage)


def pack(
    keys: Float[Array, "N B K D"],
    values: Float[Array, "N B K D"],
    backend: str = "xla",
    dtype: DTypeLike | None = None,
    scaled: bool = False,
) -> Storage:
    """Physical storage of a backend from logical blocks.

    Args:
      keys: keys of every block.
      values: values of every block.
      backend: a key of `LAYOUTS`.
      dtype: what is stored; None: the dtype of `keys`.
      scaled: for 8-bit dtypes: with a scale for each token and head.

    Raises:
      NotImplementedError: the backend has no layout, or its layout does not hold this dtype.
      ValueError: `scaled` with a dtype of more than 8 bits.
    """
    dtype = jnp.dtype(keys.dtype if dtype is None else dtype).name
    return _named(backend, dtype, scaled).pack(keys, values, dtype, scaled)


def unpack(storage: Storage) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    """Logical keys and values of every block; 8-bit ones in float32, with their scales."""
    return _of(storage).unpack(storage)


def copy_blocks(storage: Storage, source: Int[Array, " n"], target: Int[Array, " n"]) -> Storage:
    """Copies whole blocks within a layer; a target outside the pool is dropped."""
    return jax.tree.map(lambda array: array.at[target].set(array[source], mode="drop"), storage)
