"""Keys and values of preempted sequences in host memory: whole blocks go out and come back, to the bit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpage.buckets import SWAP_BUCKETS, bucket
from jaxpage.programs import Programs
from pallas_kernels import layout

__all__ = ["Swapped", "swap_in", "swap_out"]

Layers = tuple[layout.Storage, ...]


class Swapped(NamedTuple):
    """Blocks of one sequence in host memory.

    Attributes:
      layers: the storage of each layer, cut down to the blocks that hold the tokens and padded to a bucket.
      length: tokens in them.
    """

    layers: Layers
    length: int

    @property
    def nbytes(self) -> int:
        """Host memory taken."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.layers))


def swap_out(programs: Programs, storage: Layers, blocks: list[int], length: int) -> Swapped:
    """Copies blocks to the host."""
    layers = programs.run(_read, storage, _padded(blocks, bucket(len(blocks), SWAP_BUCKETS)))
    return Swapped(jax.device_get(layers), length)


def swap_in(programs: Programs, storage: Layers, swapped: Swapped, blocks: list[int]) -> Layers:
    """Copies what was swapped out into as many blocks. The storage is donated."""
    num_blocks = jax.tree.leaves(swapped.layers)[0].shape[0]
    return programs.run(_write, storage, jax.tree.map(jnp.asarray, swapped.layers), _padded(blocks, num_blocks), donate=(0,))


def _padded(blocks: list[int], count: int) -> Int[Array, " n"]:
    return jnp.asarray(np.pad(np.asarray(blocks, np.int32), (0, count - len(blocks))))


def _read(storage: Layers, blocks: Int[Array, " n"]) -> Layers:
    return jax.tree.map(lambda leaf: leaf[blocks], storage)


def _write(storage: Layers, values: Layers, blocks: Int[Array, " n"]) -> Layers:
    def write(leaf: Array, value: Array) -> Array:
        return leaf.at[jnp.where(blocks > 0, blocks, leaf.shape[0])].set(value, mode="drop")

    return jax.tree.map(write, storage, values)
