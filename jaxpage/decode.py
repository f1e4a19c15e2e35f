"""Prefill and decode on the device: model, sampling, stopping and block allocation in one program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpage.kv_cache import KVCache, blocks_needed, reserve
from jaxpage.model import CausalModel
from jaxpage.sampling import Sampler, count_tokens, sample, score_tokens

__all__ = ["LENGTH", "RUNNING", "STOP", "DecodeState", "Decoded", "decode_loop", "decode_step", "emit", "init_state", "prefill", "starved"]

RUNNING, STOP, LENGTH = 0, 1, 2
"""Why a sequence ended, if it did: values of `DecodeState.finish`."""

_LOGIT_ROWS = 64  # prompt rows whose logits are in memory at a time


class DecodeState(NamedTuple):
    """A batch of sequences being decoded, one a row of the cache's table."""

    cache: KVCache
    sampler: Sampler
    tokens: Int[Array, " S"]  # each sequence's newest token, which the cache does not hold yet
    active: Bool[Array, " S"]
    num_produced: Int[Array, " S"]
    finish: Int[Array, " S"]
    history: Int[Array, "S W"] | None = None  # all tokens of each sequence, where somebody looks them up


class Decoded(NamedTuple):
    """What a run of steps produced. Row s's tokens are the first columns, as many as its `num_produced` rose by; the rest are -1.

    Log-probabilities mean something only where there is a token.
    """

    tokens: Int[Array, "S steps"]
    logprobs: Float[Array, "S steps"] | None
    top_ids: Int[Array, "S steps n"] | None
    top_logprobs: Float[Array, "S steps n"] | None


def init_state(cache: KVCache, sampler: Sampler, tokens: Int[Array, " S"], active: Bool[Array, " S"]) -> DecodeState:
    """A batch about to decode: `tokens` are the last prompt tokens, the cache holds those before them."""
    num_produced, finish = jnp.zeros((2, *tokens.shape), jnp.int32)  # two buffers, so that both can be donated
    return DecodeState(cache, sampler, tokens, active, num_produced, finish)


def prefill(
    model: CausalModel,
    cache: KVCache,
    tokens: Int[Array, " T"],
    lengths: Int[Array, " S"],
    query_starts: Int[Array, " S+1"],
    targets: Int[Array, " T"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[KVCache, Float[Array, " T"] | None]:
    """Runs prompt tokens of many sequences and writes their keys and values.

    Args:
      model: the model.
      cache: a cache with room for them.
      tokens: a ragged batch; rows past query_starts[-1] are padding.
      lengths: tokens each sequence holds after this call; 0 for one that takes no part.
      query_starts: sequence s owns rows query_starts[s] to query_starts[s + 1].
      targets: the token that follows each row, to be scored; None scores none.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (cache, log-probabilities of the targets or None).
    """
    hidden, cache = model.step(tokens, cache, lengths, query_starts, implementation=implementation)
    if targets is None:
        return cache, None
    return cache, score_rows(model, hidden, jnp.maximum(targets, 0))


def score_rows(model: CausalModel, hidden: Float[Array, "T hidden"], targets: Int[Array, " T"]) -> Float[Array, " T"]:
    """Log-probability of one token after each row of hidden states, a few rows at a time."""
    count, width = hidden.shape
    rows = min(_LOGIT_ROWS, count)
    pad = -count % rows
    parts = (jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, rows, width), jnp.pad(targets, (0, pad)).reshape(-1, rows))
    return lax.map(lambda part: score_tokens(model.logits(part[0]), part[1]), parts).reshape(-1)[:count]


def starved(state: DecodeState) -> Bool[Array, " S"]:
    """Active sequences whose next token needs a block that the pool does not have, in row order as `reserve` serves them."""
    lengths = state.cache.table.lengths
    room = state.cache.table.blocks.shape[1] * state.cache.block_size
    need = blocks_needed(state.cache, lengths + (state.active & (lengths < room)))
    return state.active & (need > 0) & (jnp.cumsum(need) > state.cache.pool.num_free)


def decode_step(
    model: CausalModel, state: DecodeState, *, num_logprobs: int | None = None, implementation: str | None = None
) -> tuple[DecodeState, Decoded]:
    """Decodes one token of every active sequence that is not starved (see `starved`).

    Args:
      model: the model.
      state: the batch.
      num_logprobs: also return the log-probability of each token and of so many best alternatives; None returns none.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (state, the tokens with a steps axis of 1; -1 in rows that made none).
    """
    # A sequence whose row is full has nowhere to go: it has reached the length that the cache allows.
    full = state.active & (state.cache.table.lengths >= state.cache.table.blocks.shape[1] * state.cache.block_size)
    cache, ok = reserve(state.cache, state.cache.table.lengths + (state.active & ~full), max_new_blocks=1)
    runs = state.active & ~full & ok
    lengths = jnp.where(runs, cache.table.lengths, 0)
    hidden, cache = model.step(state.tokens, cache, lengths, implementation=implementation)
    logits = model.logits(hidden)
    state = state._replace(cache=cache, finish=jnp.where(full, LENGTH, state.finish))
    return emit(state, logits, lengths, runs, num_logprobs=num_logprobs)


def emit(
    state: DecodeState, logits: Float[Array, "S V"], lengths: Int[Array, " S"], runs: Bool[Array, " S"], *, num_logprobs: int | None = None
) -> tuple[DecodeState, Decoded]:
    """Samples the next token of sequences, and ends those that it ends.

    Args:
      state: the batch.
      logits: scores that follow each sequence's newest token.
      lengths: tokens that each sequence has.
      runs: the sequences that take a token; they are active from now on unless it is their last.
      num_logprobs: see `decode_step`.

    Returns:
      (state, the tokens with a steps axis of 1; -1 in rows that take none).
    """
    tokens = sample(logits, state.sampler, lengths, state.num_produced)
    num_produced = state.num_produced + runs
    stops = jnp.any(tokens[:, None] == state.sampler.stop_ids, axis=-1)
    finish = jnp.where(stops, STOP, jnp.where(num_produced >= state.sampler.max_tokens, LENGTH, RUNNING))
    finish = jnp.where(runs, finish, state.finish).astype(jnp.int32)
    sampler = count_tokens(state.sampler, tokens, runs)
    made = jnp.where(runs, tokens, -1)
    active = (state.active | runs) & (finish == RUNNING)
    history = state.history
    if history is not None:
        history = history.at[jnp.arange(made.shape[0]), jnp.where(runs, lengths, history.shape[1])].set(tokens, mode="drop")
    state = DecodeState(state.cache, sampler, jnp.where(runs, tokens, state.tokens), active, num_produced, finish, history)
    if num_logprobs is None:
        return state, Decoded(made[:, None], None, None, None)
    scores, ids, best = lax.cond(
        jnp.any(sampler.scored & runs),
        lambda: _best(logits, tokens, num_logprobs),
        lambda: (jnp.zeros(made.shape), *(jnp.zeros((*made.shape, num_logprobs), dtype) for dtype in (jnp.int32, jnp.float32))),
    )
    return state, Decoded(made[:, None], scores[:, None], ids[:, None], best[:, None])


def _best(logits: Float[Array, "S V"], tokens: Int[Array, " S"], count: int) -> tuple[Array, Array, Array]:
    """Log-probability of each token, and the ids and log-probabilities of the best ones."""
    best, ids = lax.top_k(logits, count)
    return score_tokens(logits, tokens), ids.astype(jnp.int32), best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def decode_loop(
    model: CausalModel,
    state: DecodeState,
    num_steps: int,
    limit: Int[Array, ""] | None = None,
    until_end: Bool[Array, ""] | None = None,
    *,
    num_logprobs: int | None = None,
    implementation: str | None = None,
) -> tuple[DecodeState, Decoded, Bool[Array, " S"]]:
    """Decodes up to `num_steps` tokens of every active sequence, as one loop on the device.

    The loop ends when no sequence is active, when `num_steps` are made, or when a sequence needs a block and none is free; then no
    sequence has taken the step.

    Args:
      model: the model.
      state: the batch. Donate it under `jax.jit`.
      num_steps: most steps, static: the width of the result.
      limit: most steps of this run; None: `num_steps`.
      until_end: the loop also ends once any sequence has; None: it does not.
      num_logprobs: see `decode_step`.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (state, tokens, starved): `starved` marks the sequences that lack a block.
    """
    shapes = jax.eval_shape(lambda: decode_step(model, state, num_logprobs=num_logprobs, implementation=implementation)[1])
    buffers = jax.tree.map(lambda leaf: jnp.full((leaf.shape[0], num_steps, *leaf.shape[2:]), -1, leaf.dtype), shapes)

    most = num_steps if limit is None else jnp.minimum(limit, num_steps)

    def unfinished(carry: tuple) -> Bool[Array, ""]:
        step, now, _ = carry
        goes_on = (step < most) & jnp.any(now.active) & ~jnp.any(starved(now))
        return goes_on if until_end is None else goes_on & ~(until_end & jnp.any(state.active & ~now.active))

    def advance(carry: tuple) -> tuple:
        step, state, buffers = carry
        state, made = decode_step(model, state, num_logprobs=num_logprobs, implementation=implementation)
        buffers = jax.tree.map(lambda buffer, one: lax.dynamic_update_slice_in_dim(buffer, one, step, axis=1), buffers, made)
        return step + 1, state, buffers

    _, end, buffers = lax.while_loop(unfinished, advance, (jnp.int32(0), state, buffers))
    return end, buffers, starved(end)
