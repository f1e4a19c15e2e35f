"""What sharing one document's blocks saves: many users who each add a question of their own.

Twice: with the real pool, tables and indexes but without keys and values, so that 100 users of 50K tokens fit anywhere; and with all of
it, a model's outputs included, at a size that a CPU can do.
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
from experiments.prefix_engine import ModelName, serve_users
from experiments.replay import INDEXES
from jaxpage.block_pool import hold

__all__ = ["EXPERIMENT", "PrefixSharing"]

_ALONE = "none"
_TABLES, _ENGINE = "tables", "engine"


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
    model: ModelName = "smollm2-135m"
    """What the engine runs: SmolLM2 (fetched the first time), a tiny decoder with random weights, or nothing."""
    engine_users: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Users at a time in the engine."""
    engine_document_tokens: int = 512
    """Tokens of their document."""
    engine_own_tokens: int = 16
    """Tokens that each of them adds."""
    seed: int = 0
    """Seed of the tokens."""

    def __post_init__(self) -> None:
        check_block_sizes((self.block_size,))
        for users, *tokens in (
            (self.users, self.document_tokens, self.own_tokens),
            (self.engine_users, self.engine_document_tokens, self.engine_own_tokens),
        ):
            if not users or min(*users, *tokens) < 1:
                raise ValueError(f"users, document_tokens and own_tokens must be positive, got {users}, {tokens[0]}, {tokens[1]}")


def _points(config: PrefixSharing) -> Iterator[Point]:
    for part, counts in ((_TABLES, config.users), (_ENGINE, config.engine_users if config.model != "none" else ())):
        for users in counts:
            for index in (_ALONE, *INDEXES):
                yield {"part": part, "users": users, "index": index}


def _measure(config: PrefixSharing, point: Point) -> Row:
    if point["part"] == _TABLES:
        return _measure_tables(config, point)
    tokens = (config.engine_document_tokens, config.engine_own_tokens)
    return serve_users(config.model, *tokens, point["users"], max(config.engine_users), point["index"], config.seed)


def _measure_tables(config: PrefixSharing, point: Point) -> Row:
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
    tables, engine = ([row for row in rows if row["part"] == part] for part in (_TABLES, _ENGINE))
    last = [row for row in tables if row["users"] == max(config.users) and row["index"] != _ALONE]
    for row in last[:1]:
        yield (
            f"{row['users']} users of one document of {config.document_tokens:,} tokens, each with {config.own_tokens} of their own: "
            f"{row['table_tokens']:,} tokens are in {row['kv_tokens']:,} slots. **{row['shared_blocks']:,} blocks are shared, and the "
            f"memory is {row['token_factor']:.1f} times less** ({row['block_factor']:.1f} times in whole blocks)."
        )
    yield Table(tables, ("users", "index", "blocks_used", "shared_blocks", "kv_tokens", "computed_tokens", "token_factor", "block_factor"))
    yield Picture("blocks", "Blocks in use against the number of users.", _blocks_figure(tables))
    if engine:
        yield from _engine_report(config, engine)


def _engine_report(config: PrefixSharing, rows: Sequence[Row]) -> Iterator[Part]:
    most = max(row["users"] for row in rows)
    by_index = {row["index"]: row for row in rows if row["users"] == most}
    outputs = {users: {row["outputs"] for row in rows if row["users"] == users} for users in config.engine_users}
    same = "are the same in all cases" if all(len(each) <= 1 for each in outputs.values()) else "**differ**"
    for index in INDEXES:
        if {index, _ALONE} <= by_index.keys():
            shared, alone = by_index[index], by_index[_ALONE]
            yield (
                f"Through the engine ({config.model}, float32), {most} users who come at once, {config.engine_document_tokens} tokens of a "
                f"document and {config.engine_own_tokens} of their own, index {index}: **{alone['kv_tokens'] / shared['kv_tokens']:.1f} "
                f"times less memory, all first tokens {alone['last_first_token_s'] / shared['last_first_token_s']:.1f} times sooner** "
                f"({shared['last_first_token_s']:.2f} s, not {alone['last_first_token_s']:.2f} s). Output tokens {same}."
            )
    columns = ("blocks_used", "kv_tokens", "computed_tokens", "last_first_token_s", "mean_first_token_s", "outputs")
    yield Table(rows, ("users", "index", *columns))
    yield Picture("engine", f"{config.model} through the engine: memory at its fullest, and the last first token.", _engine_figure(rows))


def _series(rows: Sequence[Row], column: str, unit: float) -> dict[str, tuple[list, list]]:
    """A column against the number of users for each index; equal lines are one."""
    lines = {}
    for index in (_ALONE, *INDEXES):
        chosen = [row for row in rows if row["index"] == index]
        lines[index] = ([row["users"] for row in chosen], [row[column] / unit for row in chosen])
    named = {"no sharing": lines.pop(_ALONE)}
    return named | ({" and ".join(lines): lines["hash"]} if lines["hash"] == lines["radix"] else lines)


def _blocks_figure(rows: Sequence[Row]) -> Any:
    figure, (ax,) = plot.grid(width=5.2)
    plot.lines(ax, _series(rows, "blocks_used", 1000), xlabel="users of one document", ylabel="blocks in use, thousands", ylim=(0, None))
    return figure


def _engine_figure(rows: Sequence[Row]) -> Any:
    figure, axes = plot.grid(1, 2, width=3.8, height=2.8)
    columns = {"kv_tokens": "tokens in the KV memory", "last_first_token_s": "until all have a first token, s"}
    for ax, (column, label) in zip(axes, columns.items(), strict=True):
        plot.lines(ax, _series(rows, column, 1), xlabel="users of one document", ylabel=label, ylim=(0, None))
    return figure


_QUICK = PrefixSharing(model="tiny", engine_users=(1, 2, 4, 8))

EXPERIMENT = Experiment(PrefixSharing, _QUICK, _points, _measure, _report)
