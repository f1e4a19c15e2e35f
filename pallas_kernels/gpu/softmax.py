"""The arithmetic of a running softmax (Milakov and Gimelshein, 2018), in base 2."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.gpu.spec import Spec

__all__ = ["MASKED", "Softmax", "add_scores", "finish", "scaled", "times_scale", "where_seen"]

MASKED = -1e30  # finite: -inf - -inf is NaN
_LOG2E = math.log2(math.e)


class Softmax(NamedTuple):
    """What is known of each query's scores so far."""

    highest: Float[Array, " queries"]
    total: Float[Array, " queries"]  # of their weights, relative to the highest


def scaled(spec: Spec, scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores in base 2, capped.

    The tanh of the soft cap is made of an exponential: the GPU's own approximate tanh is wrong in the fourth digit.
    """
    if spec.soft_cap is None:
        return scores * (spec.scale * _LOG2E)
    cap = spec.soft_cap * _LOG2E
    return cap - 2 * cap / (jnp.exp2(scores * (2 * spec.scale * _LOG2E / spec.soft_cap)) + 1)


def add_scores(state: Softmax, scores: Float[Array, "..."], tokens: int) -> tuple[Softmax, Float[Array, "..."], Float[Array, " queries"]]:
    """Adds the scores of a tile, whose axis `tokens` is that of the tokens.

    Returns:
      (state, weights, decay): the weight of each token, and what the results so far are worth beside them.
    """
    highest = jnp.maximum(state.highest, jnp.max(scores, axis=tokens))
    decay = jnp.exp2(state.highest - highest)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(highest, scores.shape, [1 - tokens]))
    return Softmax(highest, state.total * decay + jnp.sum(weights, axis=tokens)), weights, decay


def times_scale(array: Float[Array, "..."], scale: Float[Array, " tile"] | None, tokens: int) -> Float[Array, "..."]:
    """Scores or weights of a tile, whose axis `tokens` is that of the tokens, times a scale of each token."""
    return array if scale is None else array * lax.broadcast_in_dim(scale, array.shape, [tokens])


def where_seen(scores: Float[Array, "..."], *conditions: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Scores of the tokens that meet all conditions; the others weigh nothing beside one that does."""
    for condition in conditions:
        scores = jnp.where(condition, scores, MASKED)
    return scores


def finish(state: Softmax) -> tuple[Float[Array, " queries"], Float[Array, " queries"]]:
    """(factor, lse): what to multiply each result by, and the natural log-sum-exp; 0 and -inf for a query that saw no token."""
    seen = state.highest > MASKED / 2
    total = jnp.where(seen, state.total, 1.0)
    lse = (state.highest + jnp.log2(total)) / _LOG2E
    return jnp.where(seen, 1.0 / total, 0.0), jnp.where(seen, lse, -jnp.inf)
