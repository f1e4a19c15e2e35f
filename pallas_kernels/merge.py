"""Merges attention over parts of a context into attention over all of it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["merge_states"]


def merge_states(out: Float[Array, "P ... D"], lse: Float[Array, "P ..."]) -> tuple[Float[Array, "... D"], Float[Array, "..."]]:
    """Attention over P disjoint parts of a context, as one (Milakov and Gimelshein, 2018).

    Args:
      out: each part's own attention, normalised.
      lse: log-sum-exp of each part's scores, natural; -inf for a part that saw no token: it takes no part, whatever its `out` holds.

    Returns:
      (out, lse) of the whole in float32; zeros and -inf where no part saw a token.
    """
    out, lse = out.astype(jnp.float32), lse.astype(jnp.float32)
    highest = jnp.max(lse, axis=0, keepdims=True)
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)  # -inf - -inf is NaN
    weights = jnp.exp(lse - highest)
    total = jnp.sum(weights, axis=0)
    weights = (weights / jnp.where(total > 0, total, 1.0)[None])[..., None]
    merged = jnp.sum(jnp.where(weights > 0, weights * out, 0.0), axis=0)
    return merged, highest[0] + jnp.log(total)
