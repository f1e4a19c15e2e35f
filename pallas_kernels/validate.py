"""Checks of the arguments of paged attention: static ones at trace time, dynamic ones on concrete values in tests and debug mode."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels import layout

__all__ = ["dynamic", "static"]

_DTYPES = ("float32", "bfloat16", "float16")


def static(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    storage: layout.Storage,
    block_table: jax.Array,
    lengths: jax.Array,
    query_starts: jax.Array | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
) -> None:
    """Checks ranks, shapes, dtypes and static numbers.

    Raises:
      ValueError: names the argument, what was given and what is allowed.
    """
    if q.ndim != 3:
        raise ValueError(f"q must have shape [T, H, D], got {q.shape}")
    num_queries, num_heads, head_dim = q.shape
    if num_queries == 0:
        raise ValueError("q must have at least one row, got none")
    held = layout.sizes(storage)
    if head_dim != held.head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the cache holds {held.head_dim}")
    if num_heads % held.num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which must be a multiple of the cache's {held.num_kv_heads} kv heads")
    for name, array in (("k", k), ("v", v)):
        if array.shape != (num_queries, held.num_kv_heads, head_dim):
            raise ValueError(f"{name} must have shape [T, K, D] = {(num_queries, held.num_kv_heads, head_dim)}, got {array.shape}")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}, got {array.dtype.name}")
    if block_table.ndim != 2 or block_table.shape[1] < 1:
        raise ValueError(f"block_table must have shape [S, M] with M >= 1, got {block_table.shape}")
    num_seqs = block_table.shape[0]
    if lengths.shape != (num_seqs,):
        raise ValueError(f"lengths must have shape [S] = {(num_seqs,)}, got {lengths.shape}")
    if query_starts is None and num_queries != num_seqs:
        raise ValueError(f"decode (query_starts=None) takes one query a sequence: q has {num_queries} rows, block_table {num_seqs}")
    if query_starts is not None and query_starts.shape != (num_seqs + 1,):
        raise ValueError(f"query_starts must have shape [S + 1] = {(num_seqs + 1,)}, got {query_starts.shape}")
    for name, indices in (("block_table", block_table), ("lengths", lengths), ("query_starts", query_starts)):
        if indices is not None and indices.dtype != jnp.int32:
            raise ValueError(f"{name} must hold int32, got {indices.dtype.name}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token or None, got {window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have shape [H] = {(num_heads,)}, got {sinks.shape}")
    if isinstance(scale, jax.core.Tracer):
        raise ValueError("scale must be a number, known when the call is traced")
    if isinstance(storage, layout.TpuStorage) and storage.form.narrow:
        if storage.form.scaled and kv_scales is not None:
            raise ValueError("kv_scales are for storage without scales of its own, this has one for each token and head")
        if not storage.form.scaled and kv_scales is None:
            raise ValueError(f"{storage.form.dtype} storage without scales of its own needs kv_scales")
    if kv_scales is not None and kv_scales.shape != (2,):
        raise ValueError(f"kv_scales must have shape (2,), one for keys and one for values, got {kv_scales.shape}")


def dynamic(
    block_table: ArrayLike,
    lengths: ArrayLike,
    query_starts: ArrayLike | None,
    *,
    num_blocks: int,
    block_size: int,
    num_queries: int,
) -> None:
    """Checks values that are only known at run time. Takes concrete arrays.

    Raises:
      ValueError: a length beyond the table or below zero, a live block outside the pool, query counts that do not fit.
    """
    block_table, lengths = np.asarray(block_table), np.asarray(lengths)
    room = block_table.shape[1] * block_size
    for seq, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise ValueError(f"lengths[{seq}] is {length}, the table has room for 0 to {room} tokens")
        live = block_table[seq, : -(-int(length) // block_size)]
        bad = live[(live < 1) | (live >= num_blocks)]
        if bad.size:
            raise ValueError(f"block_table[{seq}] holds block {bad[0]}, the pool hands out blocks 1 to {num_blocks - 1}")
    if query_starts is None:
        return
    starts = np.asarray(query_starts)
    counts = np.diff(starts)
    if starts[0] < 0 or np.any(counts < 0) or starts[-1] > num_queries:
        raise ValueError(f"query_starts must rise from 0 or more to at most {num_queries}, got {starts.tolist()}")
    if np.any(counts > lengths):
        seq = int(np.argmax(counts > lengths))
        raise ValueError(f"sequence {seq} has {counts[seq]} queries but only {lengths[seq]} tokens")
