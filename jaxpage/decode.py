"""Prefill and decode on the device: model, sampling, stopping and block allocation in one program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpage.kv_cache import KVCache, blocks_needed, reserve
from jaxpage.model import CausalModel
from jaxpage.sampling import Sampler, count_tokens, sample, score_tokens

__all__ = ["LENGTH", "RUNNING", "STOP", "DecodeState", "Decoded", "decode_loop", "decode_step", "init_state", "prefill", "starved"]

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
    rows = min(_LOGIT_ROWS, tokens.shape[0])
    pad = -tokens.shape[0] % rows
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, rows, hidden.shape[-1])
    goals = jnp.pad(targets, (0, pad)).reshape(-1, rows)
    scores = lax.map(lambda part: score_tokens(model.logits(part[0]), jnp.maximum(part[1], 0)), (hidden, goals))
    return cache, scores.reshape(-1)[: tokens.shape[0]]


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
    tokens = sample(logits, state.sampler, lengths, state.num_produced)

    num_produced = state.num_produced + runs
    stops = jnp.any(tokens[:, None] == state.sampler.stop_ids, axis=-1)
    finish = jnp.where(stops, STOP, jnp.where(num_produced >= state.sampler.max_tokens, LENGTH, RUNNING))
    finish = jnp.where(runs, finish, jnp.where(full, LENGTH, state.finish))
    sampler = count_tokens(state.sampler, tokens, runs)
    tokens = jnp.where(runs, tokens, state.tokens)
    state = DecodeState(cache, sampler, tokens, state.active & (finish == RUNNING), num_produced, finish.astype(jnp.int32))

    made = jnp.where(runs, tokens, -1)[:, None]
    if num_logprobs is None:
        return state, Decoded(made, None, None, None)
    scores = score_tokens(logits, tokens)
    best, ids = lax.top_k(logits, num_logprobs)
    best = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return state, Decoded(made, scores[:, None], ids[:, None].astype(jnp.int32), best[:, None])


def decode_loop(
    model: CausalModel, state: DecodeState, num_steps: int, *, num_logprobs: int | None = None, implementation: str | None = None
) -> tuple[DecodeState, Decoded, Bool[Array, " S"]]:
    """Decodes up to `num_steps` tokens of every active sequence, as one loop on the device.

    The loop ends when no sequence is active, when `num_steps` are made, or when a sequence needs a block and none is free; then no
    sequence has taken the step.

    Args:
      model: the model.
      state: the batch. Donate it under `jax.jit`.
      num_steps: most steps, static.
      num_logprobs: see `decode_step`.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (state, tokens, starved): `starved` marks the sequences that lack a block.
    """
    shapes = jax.eval_shape(lambda: decode_step(model, state, num_logprobs=num_logprobs, implementation=implementation)[1])
    buffers = jax.tree.map(lambda leaf: jnp.full((leaf.shape[0], num_steps, *leaf.shape[2:]), -1, leaf.dtype), shapes)

    def unfinished(carry: tuple) -> Bool[Array, ""]:
        step, state, _ = carry
        return (step < num_steps) & jnp.any(state.active) & ~jnp.any(starved(state))

    def advance(carry: tuple) -> tuple:
        step, state, buffers = carry
        state, made = decode_step(model, state, num_logprobs=num_logprobs, implementation=implementation)
        buffers = jax.tree.map(lambda buffer, one: lax.dynamic_update_slice_in_dim(buffer, one, step, axis=1), buffers, made)
        return step + 1, state, buffers

    _, state, buffers = lax.while_loop(unfinished, advance, (jnp.int32(0), state, buffers))
    return state, buffers, starved(state)
