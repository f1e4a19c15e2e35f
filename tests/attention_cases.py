"""Random paged-attention problems with every trap set: shuffled blocks, poisoned slots, junk in unused table entries."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout

KV_SCALES = np.asarray([0.04, 0.05], np.float32)  # of keys and values in 8 bits without scales of their own


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. `new` tokens of each sequence are queries, the rest of its length is context."""

    lengths: tuple[int, ...]
    new: tuple[int, ...] | None = None  # None: decode
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    width: int | None = None  # columns of the table; None: as many as the longest sequence needs
    padding: int = 0  # query rows past the last sequence
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    scaled: bool = False  # 8-bit dtypes: a scale for each token and head, else `KV_SCALES`

    @property
    def compute_dtype(self) -> str:
        """Of queries, new keys and new values."""
        return self.dtype if jnp.dtype(self.dtype).itemsize > 1 else "bfloat16"

    @property
    def kv_scales(self) -> np.ndarray | None:
        """The scales that the call takes, if any."""
        return KV_SCALES if jnp.dtype(self.dtype).itemsize == 1 and not self.scaled else None


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of `jaxpage.paged_attention`, and the logical blocks after the write for the oracle (8-bit ones before rounding)."""

    arguments: tuple
    options: dict
    keys: np.ndarray
    values: np.ndarray
    after: layout.Storage | None = None  # what the write has to make of the storage, but for the null block


def build(case: Case, seed: int = 0, backend: str = "xla") -> Problem:
    """Draws a problem. Slots that hold no token are NaN, and unused table entries name somebody else's blocks."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(case.lengths, np.int32)
    counts = np.minimum(lengths, 1) if case.new is None else np.asarray(case.new, np.int32)
    used = -(-lengths // case.block_size)
    width = case.width or max(1, int(used.max()))
    num_blocks = int(used.sum()) + 3
    ids = rng.permutation(np.arange(1, num_blocks))
    table = rng.integers(0, num_blocks, (len(lengths), width)).astype(np.int32)
    start = 0
    for seq, count in enumerate(used):
        table[seq, :count] = ids[start : start + count]
        start += count

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), case.compute_dtype), np.float32)

    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    num_rows = len(lengths) if case.new is None else int(counts.sum()) + case.padding
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    k, v = draw(num_rows, case.kv_heads, case.head_dim), draw(num_rows, case.kv_heads, case.head_dim)
    q = draw(num_rows, case.kv_heads * case.group, case.head_dim)
    before = {}
    for side, full, new in (("k", keys, k), ("v", values, v)):
        for seq, length in enumerate(lengths):
            token = np.arange(length - counts[seq])
            full[table[seq, token // case.block_size], token % case.block_size] = draw(len(token), case.kv_heads, case.head_dim)
        before[side] = full.copy()
        for seq, length in enumerate(lengths):
            token = np.arange(length - counts[seq], length)
            rows = seq + np.zeros(counts[seq], int) if case.new is None else np.arange(starts[seq], starts[seq + 1])
            full[table[seq, token // case.block_size], token % case.block_size] = new[rows]
    options = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    if case.kv_scales is not None:
        options["kv_scales"] = jnp.asarray(case.kv_scales)
    if case.sinks:
        options["sinks"] = jnp.asarray(draw(case.kv_heads * case.group))
    arguments = (
        *(jnp.asarray(array, case.compute_dtype) for array in (q, k, v)),
        _store(case, before["k"], before["v"], backend),
        jnp.asarray(table),
        jnp.asarray(lengths),
        None if case.new is None else jnp.asarray(starts),
    )
    return Problem(arguments, options, keys, values, _store(case, keys, values, backend))


def _store(case: Case, keys: np.ndarray, values: np.ndarray, backend: str) -> layout.Storage:
    if case.kv_scales is not None:
        keys, values = keys / case.kv_scales[0], values / case.kv_scales[1]
        if case.dtype == "int8":  # which has no NaN: the largest number is the poison
            keys, values = np.nan_to_num(keys, nan=1e9), np.nan_to_num(values, nan=1e9)
    source = case.dtype if case.compute_dtype == case.dtype else "float32"
    return layout.pack(jnp.asarray(keys, source), jnp.asarray(values, source), backend, case.dtype, case.scaled)


def pairwise(levels: Mapping[str, Sequence]) -> list[dict]:
    """Few combinations of levels in which every two levels of different factors meet at least once; always the same ones."""
    pairs_of = list(itertools.combinations(levels, 2))

    def pairs(row: dict) -> set:
        return {(a, row[a], b, row[b]) for a, b in pairs_of if a in row and b in row}

    missing = {(a, x, b, y): None for a, b in pairs_of for x in levels[a] for y in levels[b]}  # a dictionary keeps the order
    rows: list[dict] = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = {a: x, b: y}
        for name in levels:
            if name not in row:
                turn = len(rows) % len(levels[name])  # so that the choice between equals is not always the same
                row[name] = max(
                    (*levels[name][turn:], *levels[name][:turn]), key=lambda level: len(pairs(row | {name: level}) & missing.keys())
                )
        for pair in pairs(row):
            missing.pop(pair, None)
        rows.append({name: row[name] for name in levels})
    return rows
