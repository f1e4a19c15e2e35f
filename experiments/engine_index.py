"""Rows of `engine_bench`: how fast the prefix indexes take in and find a long prompt."""

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from experiments.experiment import Point, Row
from experiments.replay import INDEXES

if TYPE_CHECKING:
    from experiments.engine_bench import EngineBench

__all__ = ["index_row"]

_RUNS = 9


def index_row(config: "EngineBench", point: Point) -> Row:
    """Tokens a second of `insert` into an empty index, and of `match` of all of it. The tokens are a list, as the engine has them."""
    count, size = config.index_tokens, config.block_size
    tokens = np.random.default_rng(config.seed).integers(0, 49_152, count).tolist()
    blocks = list(range(1, -(-count // size) + 1))
    inserts, matches = [], []
    for _ in range(_RUNS):
        index = INDEXES[point["index"]](size, "lru")
        start = time.perf_counter()
        index.insert(tokens, blocks)
        middle = time.perf_counter()
        match = index.match(tokens)
        end = time.perf_counter()
        assert match.length >= count - size, match.length  # all but the last token, or the last block
        inserts.append(middle - start)
        matches.append(end - middle)
    return {
        "tokens": count,
        "insert_tokens_per_s": count / statistics.median(inserts),
        "match_tokens_per_s": count / statistics.median(matches),
        "insert_ms": 1e3 * statistics.median(inserts),
        "match_ms": 1e3 * statistics.median(matches),
    }
