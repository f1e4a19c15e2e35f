"""What sharing one document's blocks saves: many users who each add a question of their own.

Pool, tables and indexes are the real ones; keys and values are left out, so that 100 users of 50K tokens fit anywhere.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpage
from experiments import plot
from experiments.block_sizes import check_block_sizes
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.memory import tables_only
from experiments.replay import INDEXES
from jaxpage.block_pool import hold

__all__ = ["EXPERIMENT", "PrefixSharing"]

_ALONE = "none"


@dataclasses.dataclass(frozen=True)
class PrefixSharing:
    """Blocks of the pool that users of one document take, with and without sharing."""

    users: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)
    """Users at a time."""
    document_tokens: int = 50_000
    """Tokens of the document that all begin with."""
    own_tokens: int = 100
    """Tokens that each adds."""
    block_size: int = 16
    """Tokens a KV block holds."""
    seed: int = 0
    """Seed of the tokens."""

    def __post_init__(self) -> None:
        check_block_sizes((self.block_size,))
        if not self.users or min(*self.users, self.document_tokens, self.own_tokens) < 1:
            raise ValueError(
                f"users, document_tokens and own_tokens must be positive, got {self.users}, {self.document_tokens}, {self.own_tokens}"
            )


def _points(config: PrefixSharing) -> Iterator[Point]:
    for users in config.users:
        for index in (_ALONE, *INDEXES):
            yield {"users": users, "index": index}


def _measure(config: PrefixSharing, point: Point) -> Row:
    users, length = point["users"], config.document_tokens + config.own_tokens
    width = -(-length // config.block_size)
    cache = tables_only(num_blocks=users * width + 1, block_size=config.block_size, max_seqs=users, max_blocks_per_seq=width)
    reserve, attach = jax.jit(jaxpage.reserve, donate_argnums=0), jax.jit(jaxpage.attach, donate_argnums=0)
    computed = users * length
    held = np.empty(0, np.int32)
    if point["index"] != _ALONE:
        index = INDEXES[point["index"]](config.block_size, "lru")
        rng = np.random.default_rng(config.seed)
        document = rng.integers(0, 32_000, config.document_tokens)
        # The first user computes the document, and the index takes its full blocks while that user is still there.
        cache, _ = reserve(cache, jnp.asarray([config.document_tokens] + [0] * (users - 1), jnp.int32))
        full = config.document_tokens // config.block_size
        blocks = np.asarray(cache.table.blocks[0, :full])
        held = np.asarray(index.insert(document[: full * config.block_size], blocks), np.int32)
        cache = cache._replace(pool=jax.jit(hold)(cache.pool, jnp.asarray(held)))
        for user in range(1, users):
            match = index.match(np.concatenate([document, rng.integers(0, 32_000, config.own_tokens)]))
            index.lock(match)
            padded = np.pad(match.blocks, (0, width - len(match.blocks)))
            cache, ok = attach(cache, jnp.int32(user), jnp.asarray(padded, jnp.int32), jnp.int32(match.length))
            assert bool(ok), "the blocks are in use"
            computed -= match.length
    cache, ok = reserve(cache, jnp.full(users, length, jnp.int32))
    assert bool(ok.all()), "the pool has room for all without sharing"
    jaxpage.check_cache(cache, held)
    used = jaxpage.usage(cache)
    return {
        "blocks_used": used.blocks_used,
        "shared_blocks": int(np.sum(np.asarray(cache.pool.refs) > 1)),
        "kv_tokens": used.slots_used,
        "computed_tokens": computed,
        "table_tokens": users * length,
        "token_factor": users * length / used.slots_used,
        "block_factor": users * width / used.blocks_used,
    }


def _report(config: PrefixSharing, rows: Sequence[Row]) -> Iterator[Part]:
    last = [row for row in rows if row["users"] == max(config.users) and row["index"] != _ALONE]
    for row in last[:1]:
        yield (
            f"{row['users']} users of one document of {config.document_tokens:,} tokens, each with {config.own_tokens} of their own: "
            f"{row['table_tokens']:,} tokens are in {row['kv_tokens']:,} slots. **{row['shared_blocks']:,} blocks are shared, and the "
            f"memory is {row['token_factor']:.1f} times less** ({row['block_factor']:.1f} times in whole blocks)."
        )
    yield Table(rows, ("users", "index", "blocks_used", "shared_blocks", "kv_tokens", "computed_tokens", "token_factor", "block_factor"))
    yield Picture("blocks", "Blocks in use against the number of users.", _figure(config, rows))


def _figure(config: PrefixSharing, rows: Sequence[Row]) -> Any:
    figure, (ax,) = plot.grid(width=5.2)
    names = {_ALONE: "no sharing", "hash": "hash", "radix": "radix"}
    series = {}
    for index, name in names.items():
        chosen = [row for row in rows if row["index"] == index]
        series[name] = ([row["users"] for row in chosen], [row["blocks_used"] / 1000 for row in chosen])
    both = series.pop("radix")
    if both == series["hash"]:
        series = {"no sharing": series["no sharing"], "hash and radix": both}
    else:
        series["radix"] = both
    plot.lines(ax, series, xlabel="users of one document", ylabel="blocks in use, thousands", ylim=(0, None))
    return figure


EXPERIMENT = Experiment(PrefixSharing, PrefixSharing(), _points, _measure, _report)
