"""Random paged-attention problems with every trap set: shuffled blocks, poisoned slots, junk in unused table entries."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout


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


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of `jaxpage.paged_attention`, and the logical blocks after the write for the oracle."""

    arguments: tuple
    options: dict
    keys: np.ndarray
    values: np.ndarray


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
        return np.asarray(jnp.asarray(rng.standard_normal(shape), case.dtype), np.float32)

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
    storage = layout.pack(jnp.asarray(before["k"], case.dtype), jnp.asarray(before["v"], case.dtype), backend)
    options = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    if case.sinks:
        options["sinks"] = jnp.asarray(draw(case.kv_heads * case.group))
    arguments = (
        *(jnp.asarray(array, case.dtype) for array in (q, k, v)),
        storage,
        jnp.asarray(table),
        jnp.asarray(lengths),
        None if case.new is None else jnp.asarray(starts),
    )
    return Problem(arguments, options, keys, values)
