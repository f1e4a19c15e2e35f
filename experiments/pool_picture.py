"""A picture of a small pool: which block belongs to whom."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpage
from experiments import plot
from experiments.memory import tables_only

__all__ = ["draw_pool", "pool_text", "small_pool"]

_COLUMNS = 32
_SPARE = 8  # free blocks that the picture shows at least
_FREE, _SHARED = ".", "#"


def small_pool(users: Sequence[int], shared_tokens: int, block_size: int) -> list[list[int]]:
    """Lets users of one prefix grow in turns, a block at a time, as decoding does.

    Args:
      users: tokens that each comes to hold.
      shared_tokens: first tokens that all share; each has its own copy of a last block that these do not fill.
      block_size: tokens a block holds.

    Returns:
      The owners of each block from block 1 on.
    """
    lengths = np.asarray(users)
    widths = -(-lengths // block_size)
    used = int(widths.sum()) - (len(users) - 1) * (shared_tokens // block_size)
    num_blocks = -(-(used + _SPARE) // _COLUMNS) * _COLUMNS + 1  # whole lines, and the null block
    cache = tables_only(num_blocks=num_blocks, block_size=block_size, max_seqs=len(users), max_blocks_per_seq=int(widths.max()))
    reserve = jax.jit(jaxpage.reserve)
    held = np.zeros(len(users), np.int64)
    held[0] = shared_tokens
    cache, _ = reserve(cache, jnp.asarray(held, jnp.int32))
    others = jnp.arange(1, len(users))
    cache = jaxpage.fork(cache, jnp.zeros_like(others), others)
    held[:] = shared_tokens
    while np.any(held < lengths):
        held = np.minimum(lengths, (held // block_size + 1) * block_size)
        cache, ok = reserve(cache, jnp.asarray(held, jnp.int32))
        assert bool(ok.all()), "the pool has room for all"
    jaxpage.check_cache(cache)
    blocks = np.asarray(cache.table.blocks)
    return [[int(seq) for seq in range(len(users)) if block in blocks[seq]] for block in range(1, num_blocks)]


def _letter(owners: Sequence[int]) -> str:
    return _FREE if not owners else _SHARED if len(owners) > 1 else chr(ord("A") + owners[0] % 26)


def _rgb(owners: Sequence[int]) -> str:
    return "#eeeeee" if not owners else "#000000" if len(owners) > 1 else plot.COLOURS[owners[0] % (len(plot.COLOURS) - 1)]


def pool_text(owners: Sequence[Sequence[int]], *, colours: bool = False) -> str:
    """The pool in characters: one a block, `_COLUMNS` a line; with colours for a terminal if asked for."""
    cells = [_letter(each) for each in owners]
    if colours:
        cells = [f"\x1b[38;2;{int(rgb[1:3], 16)};{int(rgb[3:5], 16)};{int(rgb[5:7], 16)}m{cell}\x1b[0m" if cell not in (_FREE, _SHARED)
                 else f"\x1b[1m{cell}\x1b[0m" for cell, rgb in zip(cells, map(_rgb, owners), strict=True)]  # fmt: skip
    return "\n".join(" ".join(cells[start : start + _COLUMNS]) for start in range(0, len(cells), _COLUMNS))


def draw_pool(owners: Sequence[Sequence[int]]) -> Any:
    """The pool as squares in the colours of their owners, with their letters in them."""
    lines = -(-len(owners) // _COLUMNS)
    figure, (ax,) = plot.grid(width=7.2, height=0.225 * lines + 0.5)
    for place, each in enumerate(owners):
        x, y, face = place % _COLUMNS, place // _COLUMNS, _rgb(each)
        ax.bar(x, 0.92, 0.92, bottom=y - 0.46, color=face)
        ax.text(x, y, _letter(each), ha="center", va="center", fontsize=7, color="#555555" if not each else "white")
    ax.set(xlim=(-0.6, _COLUMNS - 0.4), ylim=(lines - 0.4, -0.6), aspect="equal")
    ax.set_axis_off()
    names = [f"{_letter([seq])}: user {seq + 1}" for seq in sorted({seq for each in owners for seq in each})]
    figure.supxlabel(f"{',  '.join(names)};  #: shared;  .: free", fontsize=8)
    return figure
