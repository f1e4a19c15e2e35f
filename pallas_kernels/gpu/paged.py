"""The paged context of all sequences, as the kernels take it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.gpu.format import GpuStorage

__all__ = ["Paged", "paged_context"]


class Paged(NamedTuple):
    """Arrays outside the kernels, references to global memory within."""

    kv: Any  # [N*B, 2*K*D]
    table: Any  # int32[S, M]
    scales: Any | None  # bfloat16[S, 2*K, context], keys and values in turn; of 8-bit values that have scales


def paged_context(storage: GpuStorage, block_table: Int[Array, "S M"], tile: int) -> Paged:
    """The context behind a block table, for tiles of so many tokens.

    Scales are gathered here, a 64th to a 128th of what the keys and values take: a block's are too few for a copy of their own.
    """
    num_blocks, block_size, heads, _ = storage.blocks.shape
    scales = None
    if storage.scales is not None:
        scales = jnp.swapaxes(storage.scales.at[block_table].get(mode="clip"), 1, 2)
        scales = scales.reshape(block_table.shape[0], heads, -1)
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, tile)))  # the last tile may reach beyond the table
    return Paged(storage.blocks.reshape(num_blocks * block_size, -1), block_table, scales)
