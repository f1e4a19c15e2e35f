"""What sequences take of the real pool: only pool and tables count here, so the storage is one layer of the smallest size."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import jaxpage

__all__ = ["Held", "hold", "hold_reservations", "tables_only"]

_SEQS = 128  # sequences in the pool at a time
_ENTRIES = 2**20  # most entries of the block table
_SHORTEST_ROW = 256  # entries of a row, if any sequence needs as many


class Held(NamedTuple):
    """What a number of sequences hold, in tokens and in blocks."""

    tokens: int
    reserved_tokens: int
    blocks: int

    @property
    def waste_percent(self) -> float:
        """Share of the reserved slots that hold no token."""
        return 100 * (1 - self.tokens / self.reserved_tokens)


def tables_only(*, num_blocks: int, block_size: int, max_seqs: int, max_blocks_per_seq: int) -> jaxpage.KVCache:
    """A cache whose keys and values take next to nothing."""
    config = jaxpage.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        num_blocks=num_blocks,
        block_size=block_size,
        max_seqs=max_seqs,
        max_blocks_per_seq=max_blocks_per_seq,
        dtype="float16",
    )
    return jaxpage.init_cache(config, "xla")


_reserve = jax.jit(jaxpage.reserve, donate_argnums=0)


def hold(stages: Sequence[Int[np.ndarray, " n"]], block_size: int) -> list[Held]:
    """Grows sequences through stages of their lengths in a pool that has room for all, and counts what they hold at each stage.

    The sequences pass through the pool in batches, the longest first, so that the tables stay small.

    Args:
      stages: lengths of all sequences at each stage, none shorter than before.
      block_size: tokens a block holds.
    """
    order = np.argsort(-stages[-1], kind="stable")
    counts = np.zeros((len(stages), 3), np.int64)
    longest = _row(stages[-1][order[0]], block_size)
    start = 0
    while start < len(order):
        width = max(_row(stages[-1][order[start]], block_size), min(_SHORTEST_ROW, longest))
        seqs = max(1, min(_SEQS, _ENTRIES // width))
        batch = order[start : start + seqs]
        start += seqs
        cache = tables_only(num_blocks=seqs * width + 1, block_size=block_size, max_seqs=seqs, max_blocks_per_seq=width)
        for stage, lengths in enumerate(stages):
            cache, ok = _reserve(cache, jnp.asarray(np.pad(lengths[batch], (0, seqs - len(batch))), jnp.int32))
            assert bool(ok.all()), "the pool has room for all"
            used = jaxpage.usage(cache)
            counts[stage] += (used.slots_used, used.slots_reserved, used.blocks_used)
    return [Held(*map(int, count)) for count in counts]


def _row(tokens: int, block_size: int) -> int:
    """Table entries for a sequence of so many tokens: a power of two, so that there are few shapes and few compilations."""
    return 1 << (-(-int(tokens) // block_size) - 1).bit_length()


def hold_reservations(lengths: Int[np.ndarray, " n"], reservations: Int[np.ndarray, " n"]) -> Held:
    """What sequences hold where each has a contiguous reservation: a pool of one block a sequence for each size of reservation."""
    if np.any(lengths > reservations):
        raise ValueError(f"a sequence of {np.max(lengths)} tokens is longer than its reservation")
    counts = np.zeros(3, np.int64)
    for size in np.unique(reservations):
        (held,) = hold([lengths[reservations == size]], int(size))
        counts += held
    return Held(*map(int, counts))
