"""The arithmetic of attention in the kernel: queries of one unit against some tokens, folded into a running softmax.

The running softmax (Milakov and Gimelshein, 2018) keeps for each row the highest score so far, the sum of weights and the weighted sum of
values. Scores are in units of log2(e), so that weights are powers of two; sums stay apart for each lane until the end.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.tpu.format import LANES

__all__ = ["LOG2E", "NOTHING", "Mask", "Running", "fold", "score"]

LOG2E = 1.4426950408889634
NOTHING = -1e30  # score of a token that is not seen; finite, so that a row that sees nothing stays free of NaN


class Running(NamedTuple):
    """References to the running softmax of all units of a tile."""

    highest: Float[Array, "units rows 128"]  # the same in all lanes
    total: Float[Array, "units rows 128"]  # to be summed over the lanes
    out: Float[Array, "units rows lanes"]


class Mask(NamedTuple):
    """What is seen: which scores count, and which values any row sees."""

    scores: Bool[Array, "rows tokens"]
    values: Bool[Array, "tokens lanes"]


def score(
    q: Float[Array, "rows lanes"],
    keys: Float[Array, "tokens lanes"],
    key_scales: Float[Array, "rows tokens"] | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "rows tokens"]:
    """Scores of some tokens in units of log2(e)."""
    scores = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32, precision=_precision(keys))
    if key_scales is not None:
        scores = scores * key_scales
    if soft_cap is None:
        return scores * (scale * LOG2E)
    return jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)


def fold(
    running: Running,
    unit: int | Array,
    scores: Float[Array, "rows tokens"],
    values: Float[Array, "tokens lanes"],
    value_scales: Float[Array, "rows tokens"] | None,
    mask: Mask | None,
) -> None:
    """Folds some tokens into the running softmax of one unit. `mask` holds what is seen; None: all of it."""
    if mask is not None:
        scores = jnp.where(mask.scores, scores, NOTHING)
        # A value that no row sees may be NaN, and 0 * NaN is NaN. Selecting is done in float32, which every generation can.
        values = jnp.where(mask.values, values.astype(jnp.float32), 0.0).astype(values.dtype)
        value_scales = None if value_scales is None else jnp.where(mask.scores, value_scales, 0.0)
    before = running.highest[unit]
    highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    decay = jnp.exp2(before - highest)
    weights = []
    for start in range(0, scores.shape[1], LANES):
        part = scores[:, start : start + LANES]
        weight = jnp.exp2(part - highest)
        if mask is not None:  # a row that has seen nothing yet would give a hidden token the weight 1
            weight = jnp.where(part > NOTHING / 2, weight, 0.0)
        weights.append(weight)
    running.highest[unit] = highest
    running.total[unit] = running.total[unit] * decay + sum(weights[1:], weights[0])
    joined = jnp.concatenate(weights, axis=1) if len(weights) > 1 else weights[0]
    joined = joined if value_scales is None else joined * value_scales
    out = lax.dot_general(
        joined.astype(values.dtype), values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=_precision(values)
    )
    width = out.shape[1] // LANES
    running.out[unit] = running.out[unit] * (jnp.concatenate([decay] * width, axis=1) if width > 1 else decay) + out


def _precision(operand: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if operand.dtype == jnp.float32 else None
