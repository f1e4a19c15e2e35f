"""How much KV memory contiguous reservation wastes, and how much paging does.

Five users hold 10K, 50K, 5K, 100K and 30K tokens where 128K are allowed. The three baselines are those of Kwon et al. (2023), section 6.1:
a reservation of the maximum, of the next power of two, and of exactly what the request will come to need, which nobody can know.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments import plot
from experiments.block_sizes import check_block_sizes
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table, Verbatim
from experiments.lengths import check_source, load_lengths
from experiments.memory import Held, hold, hold_reservations
from experiments.pool_picture import draw_pool, pool_text, small_pool

__all__ = ["EXPERIMENT", "Waste"]


@dataclasses.dataclass(frozen=True)
class Waste:
    """Memory that is reserved and not used, by contiguous reservation and by paging."""

    lengths: str = "five_users"
    """five_users, short_chat, long_chat, code, or the path of a trace."""
    requests: int = 1000
    """Requests to draw from a distribution."""
    max_tokens: int = 128_000
    """Most tokens of a request, and what the first baseline reserves; longer requests are cut. 0: the longest request's."""
    block_sizes: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    """Tokens a KV block holds."""
    picture_users: tuple[int, ...] = (100, 500, 50, 1000, 300)
    """Tokens of the users in the picture of the pool."""
    picture_shared_tokens: int = 48
    """First tokens that all of them share."""
    picture_block_size: int = 16
    """Tokens a block of the picture holds."""
    seed: int = 0
    """Seed of the lengths."""

    def __post_init__(self) -> None:
        check_source(self.lengths)
        check_block_sizes((*self.block_sizes, self.picture_block_size))
        if self.requests < 1 or self.max_tokens < 0:
            raise ValueError(f"requests must be positive and max_tokens not negative, got {self.requests} and {self.max_tokens}")
        if not self.picture_users or not 0 <= self.picture_shared_tokens < min(self.picture_users):
            raise ValueError(f"picture_shared_tokens must be less than each of picture_users, got {self.picture_shared_tokens}")


def _lengths(config: Waste) -> tuple[Int[np.ndarray, " n"], int]:
    total = load_lengths(config.lengths, config.requests, config.seed).total
    most = config.max_tokens or int(total.max())
    return np.minimum(total, most), most


def _at_maximum(config: Waste, _: Point) -> Held:
    lengths, most = _lengths(config)
    return hold_reservations(lengths, np.full_like(lengths, most))


def _at_power_of_two(config: Waste, _: Point) -> Held:
    lengths, most = _lengths(config)
    return hold_reservations(lengths, np.minimum(2 ** np.ceil(np.log2(lengths)).astype(np.int64), most))


def _with_foresight(config: Waste, _: Point) -> Held:
    # A reservation of exactly the final length takes as many slots as blocks of one token.
    return hold([_lengths(config)[0]], 1)[0]


def _paged(config: Waste, point: Point) -> Held:
    return hold([_lengths(config)[0]], point["block_size"])[0]


_SYSTEMS = {
    "contiguous, maximum": _at_maximum,
    "contiguous, power of two": _at_power_of_two,
    "contiguous, foresight": _with_foresight,
    "paged": _paged,
}
_PICTURE = "picture"


def _points(config: Waste) -> Iterator[Point]:
    for system in list(_SYSTEMS)[:-1]:
        yield {"system": system, "block_size": None}
    for block_size in config.block_sizes:
        yield {"system": "paged", "block_size": block_size}
    yield {"system": _PICTURE, "block_size": config.picture_block_size}


def _measure(config: Waste, point: Point) -> Row:
    if point["system"] == _PICTURE:
        return {"owners": small_pool(config.picture_users, config.picture_shared_tokens, config.picture_block_size)}
    held = _SYSTEMS[point["system"]](config, point)
    return {
        "requests": len(_lengths(config)[0]),
        "reserved_tokens": held.reserved_tokens,
        "used_tokens": held.tokens,
        "waste_percent": held.waste_percent,
        "used_percent": 100 - held.waste_percent,
    }


def _name(row: Row) -> str:
    return row["system"] if row["block_size"] is None else f"{row['system']}, blocks of {row['block_size']}"


def _report(config: Waste, rows: Sequence[Row]) -> Iterator[Part]:
    systems = [row for row in rows if row["system"] != _PICTURE]
    naive = systems[0]
    yield (
        f"{naive['requests']} requests ({config.lengths}) hold {naive['used_tokens']:,} tokens. Reserving the maximum for each takes "
        f"room for {naive['reserved_tokens']:,}: **{naive['waste_percent']:.1f} % is wasted**."
    )
    yield Table(systems, ("system", "block_size", "reserved_tokens", "used_tokens", "waste_percent"))
    yield Picture("waste", "Share of the reserved memory that holds no token.", _waste_figure(systems))
    for row in rows:
        if row["system"] == _PICTURE:
            yield (
                f"A small pool of blocks of {row['block_size']} tokens, filled by the library: users of "
                f"{', '.join(map(str, config.picture_users))} tokens who share their first {config.picture_shared_tokens} and grow in "
                "turns. One character a block: a letter is its owner, # a block that all share, and . a free one."
            )
            yield Verbatim(pool_text(row["owners"]), pool_text(row["owners"], colours=True))
            yield Picture("pool", "The pool, block by block: colours and letters are owners, # is shared by all.", draw_pool(row["owners"]))


def _waste_figure(rows: Sequence[Row]) -> Any:
    figure, (ax,) = plot.grid(width=6.4, height=0.32 * len(rows) + 0.8)
    colours = [plot.COLOURS[0] if row["system"] == "paged" else plot.COLOURS[1] for row in rows]
    texts = [f"{row['waste_percent']:.1f} %" if row["waste_percent"] >= 0.05 or row["waste_percent"] == 0 else "< 0.1 %" for row in rows]
    plot.bars(ax, [_name(row) for row in rows], [row["waste_percent"] for row in rows], texts, colours)
    ax.set(xlabel="reserved slots without a token, %", xlim=(0, 1.15 * max(1.0, *(row["waste_percent"] for row in rows))))
    return figure


EXPERIMENT = Experiment(Waste, Waste(), _points, _measure, _report)
