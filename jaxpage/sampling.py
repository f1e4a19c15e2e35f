"""How the next tokens of a batch are chosen: the device's side.

Parameters of all sequences are arrays. What no sequence of the batch may ever use is None and is not compiled; what none uses at the moment
is passed over at run time.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

__all__ = ["Bias", "Constraint", "Penalties", "Randomness", "Sampler", "Truncation", "count_tokens", "keep_top", "sample", "score_tokens"]

_NEVER = -1e30  # score of a token that must not be chosen
_CDF_TILE = 256


class Truncation(NamedTuple):
    """Which tokens may be sampled at all."""

    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]


class Randomness(NamedTuple):
    """Temperature 0 is greedy. The key of each token is fold_in(seed, tokens before it)."""

    seed: UInt32[Array, " S"]
    temperature: Float[Array, " S"]
    truncation: Truncation | None


class Penalties(NamedTuple):
    """Penalties and what they count."""

    repetition: Float[Array, " S"]
    presence: Float[Array, " S"]
    frequency: Float[Array, " S"]
    in_prompt: Bool[Array, "S V"]
    produced: Int[Array, "S V"]


class Bias(NamedTuple):
    """Values added to single tokens' scores; id -1 is no token."""

    ids: Int[Array, "S n"]
    values: Float[Array, "S n"]


class Constraint(NamedTuple):
    """Tokens that may be chosen, as bits: token t is bit t % 32 of word t // 32."""

    applies: Bool[Array, " S"]
    allowed: UInt32[Array, "S words"]


class Sampler(NamedTuple):
    """Parameters of every sequence of a batch."""

    stop_ids: Int[Array, "S n"]  # -1 is no token
    min_tokens: Int[Array, " S"]
    max_tokens: Int[Array, " S"]
    scored: Bool[Array, " S"]  # log-probabilities are asked for
    randomness: Randomness | None
    penalties: Penalties | None
    bias: Bias | None
    constraint: Constraint | None


def sample(logits: Float[Array, "S V"], sampler: Sampler, lengths: Int[Array, " S"], num_produced: Int[Array, " S"]) -> Int[Array, " S"]:
    """Chooses each sequence's next token.

    Args:
      logits: the model's scores, float32.
      sampler: parameters.
      lengths: tokens each sequence has so far, prompt included; the random key's counter.
      num_produced: tokens each sequence has produced.
    """
    scores = _barred(_constrained(_penalised(_biased(logits, sampler.bias), sampler.penalties), sampler.constraint), sampler, num_produced)
    greedy = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if sampler.randomness is None:
        return greedy
    randomness = sampler.randomness
    return lax.cond(jnp.any(randomness.temperature > 0), lambda: _draw(scores, randomness, lengths, greedy), lambda: greedy)


def _draw(scores: Float[Array, "S V"], randomness: Randomness, lengths: Int[Array, " S"], greedy: Int[Array, " S"]) -> Int[Array, " S"]:
    """Draws for the rows that have a temperature, and takes the best token of the others."""
    seed, temperature, truncation = randomness
    # Taken from the best score first, so that a small temperature cannot overflow.
    scores = (scores - jnp.max(scores, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    if truncation is not None:
        used = (truncation.top_k > 0) | (truncation.top_p < 1) | (truncation.min_p > 0)
        scores = lax.cond(jnp.any(used), lambda: jnp.where(keep_top(scores, truncation), scores, _NEVER), lambda: scores)
    keys = jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seed, lengths)
    drawn = _inverse_cdf(jax.nn.softmax(scores, axis=-1), jax.vmap(jax.random.uniform)(keys))
    return jnp.where(temperature > 0, drawn, greedy)


def score_tokens(logits: Float[Array, "S V"], tokens: Int[Array, " S"]) -> Float[Array, " S"]:
    """Log-probability of one token a row under the model."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def count_tokens(sampler: Sampler, tokens: Int[Array, " S"], counted: Bool[Array, " S"]) -> Sampler:
    """Notes produced tokens where penalties need them."""
    if sampler.penalties is None:
        return sampler
    rows = jnp.arange(tokens.shape[0])
    produced = sampler.penalties.produced.at[rows, tokens].add(counted.astype(jnp.int32))
    return sampler._replace(penalties=sampler.penalties._replace(produced=produced))


def keep_top(scores: Float[Array, "S V"], truncation: Truncation) -> Bool[Array, "S V"]:
    """Which tokens top-k, top-p and min-p leave.

    All three keep the tokens above a threshold. Top-k's and top-p's are found by bisecting over the bits of the scores, which is exact
    and needs no sort of the vocabulary.
    """
    top_k, top_p, min_p = truncation
    vocabulary = scores.shape[-1]
    keys = _ordered_bits(scores)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    best_k = _highest(lambda low: jnp.sum(keys >= low[:, None], axis=-1) >= wanted, scores.shape[0])
    kept = keys >= best_k[:, None]
    weights = jnp.where(kept, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0.0)
    mass = jnp.where(top_p < 1, top_p * jnp.sum(weights, axis=-1), 0.0)
    best_p = _highest(lambda low: jnp.sum(jnp.where(keys >= low[:, None], weights, 0.0), axis=-1) >= mass, scores.shape[0])
    best_p = jnp.where(top_p < 1, best_p, jnp.iinfo(jnp.int32).min)
    # The weight of the best token is 1.
    return kept & (keys >= best_p[:, None]) & (weights >= min_p[:, None])


def _biased(logits: Float[Array, "S V"], bias: Bias | None) -> Float[Array, "S V"]:
    if bias is None:
        return logits
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, jnp.where(bias.ids >= 0, bias.ids, logits.shape[1])].add(bias.values, mode="drop")


def _penalised(scores: Float[Array, "S V"], penalties: Penalties | None) -> Float[Array, "S V"]:
    if penalties is None:
        return scores
    repetition, presence, frequency, in_prompt, produced = penalties

    def apply() -> Float[Array, "S V"]:
        seen = in_prompt | (produced > 0)
        repeated = jnp.where(scores > 0, scores / repetition[:, None], scores * repetition[:, None])
        return jnp.where(seen, repeated, scores) - presence[:, None] * (produced > 0) - frequency[:, None] * produced

    return lax.cond(jnp.any((repetition != 1) | (presence != 0) | (frequency != 0)), apply, lambda: scores)


def _constrained(scores: Float[Array, "S V"], constraint: Constraint | None) -> Float[Array, "S V"]:
    if constraint is None:
        return scores
    tokens = jnp.arange(scores.shape[1], dtype=jnp.uint32)

    def apply() -> Float[Array, "S V"]:
        allowed = (constraint.allowed[:, tokens // 32] >> (tokens % 32)[None]) & 1 > 0
        return jnp.where(allowed | ~constraint.applies[:, None], scores, _NEVER)

    return lax.cond(jnp.any(constraint.applies), apply, lambda: scores)


def _barred(scores: Float[Array, "S V"], sampler: Sampler, num_produced: Int[Array, " S"]) -> Float[Array, "S V"]:
    """Bars stop ids of sequences that are shorter than their min_tokens."""
    early = (num_produced < sampler.min_tokens)[:, None] & (sampler.stop_ids >= 0)
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, jnp.where(early, sampler.stop_ids, scores.shape[1])].set(_NEVER, mode="drop")


def _ordered_bits(values: Float[Array, "S V"]) -> Int[Array, "S V"]:
    """Integers in the order of the float32 values."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)  # -0.0 equals 0.0
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _highest(holds: Callable[[Array], Array], rows: int) -> Int[Array, " S"]:
    """The highest integer of each row for which a condition holds that every lower integer meets too."""

    def halve(_: Int[Array, ""], bounds: tuple) -> tuple:
        low, high = bounds  # the condition holds at low and not above high
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # rounded up, without overflow
        met = holds(middle)
        return jnp.where(met, middle, low), jnp.where(met, high, middle - 1)

    limits = jnp.iinfo(jnp.int32)
    bounds = (jnp.full(rows, limits.min, jnp.int32), jnp.full(rows, limits.max, jnp.int32))
    return lax.fori_loop(0, 32, halve, bounds)[0]


def _inverse_cdf(probabilities: Float[Array, "S V"], uniform: Float[Array, " S"]) -> Int[Array, " S"]:
    """The token whose share of [0, 1) a uniform number falls in: first the tile of the vocabulary, then the token in it."""
    rows, vocabulary = probabilities.shape
    tiles = jnp.pad(probabilities, ((0, 0), (0, -vocabulary % _CDF_TILE))).reshape(rows, -1, _CDF_TILE)
    shares = jnp.sum(tiles, axis=-1)
    ends = jnp.cumsum(shares, axis=-1)
    goal = uniform * ends[:, -1]
    tile = _first_past(shares, ends, goal)
    before = jnp.where(tile > 0, jnp.take_along_axis(ends, jnp.maximum(tile - 1, 0)[:, None], axis=-1)[:, 0], 0.0)
    within = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    token = _first_past(within, jnp.cumsum(within, axis=-1), goal - before)
    return (tile * _CDF_TILE + token).astype(jnp.int32)


def _first_past(shares: Float[Array, "S n"], ends: Float[Array, "S n"], goal: Float[Array, " S"]) -> Int[Array, " S"]:
    """The first place that has a share and ends past the goal.

    Rounding may leave the goal past them all: then the last one that has a share. A long cumulative sum is computed in parallel and may
    fall by a rounding error, so that counting the ends up to the goal could lead to a place without a share.
    """
    passed = (ends <= goal[:, None]) | (shares == 0)
    last = shares.shape[1] - 1 - jnp.argmax((shares > 0)[:, ::-1], axis=-1)
    return jnp.where(jnp.all(passed, axis=-1), last, jnp.argmin(passed, axis=-1))
