"""Paged attention in NumPy and float64, one query at a time: what every implementation is compared with."""

import numpy as np


def paged_attention(q, keys, values, block_table, lengths, query_starts, *, scale, window=None, soft_cap=None, sinks=None):
    """Attention over logical blocks [N, B, K, D] that already hold the new tokens.

    Returns float64 [T, H, D], zeros in rows of no sequence.
    """
    q, keys, values = (np.asarray(array, np.float64) for array in (q, keys, values))
    block_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    out = np.zeros(q.shape)
    starts = np.arange(len(lengths) + 1) if query_starts is None else np.asarray(query_starts)
    for seq, length in enumerate(np.asarray(lengths)):
        if length == 0:
            continue
        for row in range(starts[seq], starts[seq + 1]):
            position = length - (starts[seq + 1] - row)
            first = 0 if window is None else max(0, position - window + 1)
            tokens = np.arange(first, position + 1)
            blocks, offsets = np.asarray(block_table)[seq, tokens // block_size], tokens % block_size
            for head in range(q.shape[1]):
                scores = keys[blocks, offsets, head // group] @ q[row, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                highest = max(scores.max(), sink)
                weights = np.exp(scores - highest)
                out[row, head] = weights @ values[blocks, offsets, head // group] / (weights.sum() + np.exp(sink - highest))
    return out
