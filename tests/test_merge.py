"""Merging attention over parts of a context, against attention over the whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge import merge_states


def attention(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores [rows, tokens] and values [tokens, D] give out and log-sum-exp."""
    weights = np.exp(scores)
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        return weights @ values / np.where(total > 0, total, 1)[:, None], np.log(total)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_make_the_whole(parts):
    rng = np.random.default_rng(parts)
    scores, values = rng.normal(0, 8, (6, 40)), rng.normal(size=(40, 4))
    cuts = np.array_split(np.arange(40), parts)
    out, lse = (jnp.asarray(np.stack(side)) for side in zip(*(attention(scores[:, c], values[c]) for c in cuts), strict=True))
    whole = attention(scores, values)
    for side, target in zip(merge_states(out, lse), whole, strict=True):
        np.testing.assert_allclose(side, target, rtol=1e-5, atol=1e-5)


def test_a_part_without_tokens_takes_no_part():
    out = jnp.asarray([[[1.0, 2.0]], [[jnp.nan, jnp.inf]]])
    merged, lse = merge_states(out, jnp.asarray([[3.0], [-jnp.inf]]))
    np.testing.assert_array_equal(merged, [[1.0, 2.0]])
    np.testing.assert_array_equal(lse, [3.0])


def test_no_token_at_all_gives_zeros():
    merged, lse = merge_states(jnp.full((2, 1, 3), jnp.nan), jnp.full((2, 1), -jnp.inf))
    np.testing.assert_array_equal(merged, np.zeros((1, 3)))
    np.testing.assert_array_equal(lse, [-np.inf])


def test_large_scores_do_not_overflow():
    merged, lse = merge_states(jnp.asarray([[[1.0]], [[3.0]]]), jnp.asarray([[1000.0], [1000.0]]))
    np.testing.assert_allclose(merged, [[2.0]])
    np.testing.assert_allclose(lse, [1000.0 + np.log(2)], rtol=1e-6)
