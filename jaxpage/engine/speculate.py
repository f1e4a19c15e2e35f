"""Speculative decoding: drafts are verified in one ragged pass, and the sequences keep those that they would have produced anyway."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpage import decode
from jaxpage.decode import Decoded, DecodeState
from jaxpage.engine.drafts import Drafter
from jaxpage.kv_cache import KVCache, blocks_needed, reserve, truncate
from pallas_kernels.ragged import query_places

__all__ = ["DraftCounts", "speculative_loop", "speculative_step"]


class DraftCounts(NamedTuple):
    """How many tokens were drafted for each sequence, and how many of those it kept."""

    drafted: Int[Array, " S"]
    kept: Int[Array, " S"]


def speculative_step(
    model: Drafter, state: DecodeState, most: Int[Array, " S"], *, num_logprobs: int | None = None, implementation: str | None = None
) -> tuple[DecodeState, Decoded, DraftCounts]:
    """Decodes 1 to k + 1 tokens of every active sequence that is not starved (see `jaxpage.starved`).

    The tokens are those that `decode_step` gives one after another: each is sampled from the model's own scores with its own key, and a
    draft is kept where it is the token sampled in its place (Leviathan et al., 2023, with the draw of both models made the same).

    Args:
      model: the model, with what guesses for it.
      state: the batch.
      most: most tokens of each sequence; one that may have none takes no part.
      num_logprobs: see `decode_step`.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (state, tokens with a steps axis of k + 1, counts of drafts); a row's tokens are its first ones.
    """
    before, size = state.cache.table.lengths, state.cache.block_size
    room = state.cache.table.blocks.shape[1] * size
    full = state.active & (before >= room)
    runs = state.active & ~full & (most > 0)
    # No more drafts than tokens that may still come, the one after them included.
    tokens_left = jnp.minimum(most, state.sampler.max_tokens - state.num_produced)
    wanted = jnp.where(runs, jnp.clip(jnp.minimum(tokens_left, room - before) - 1, 0, model.num_drafts), 0)
    wanted = _affordable(state.cache, before + runs, wanted)
    cache, ok = reserve(state.cache, before + runs + wanted, max_new_blocks=-(-(model.num_drafts + 1) // size))
    runs &= ok
    state = state._replace(cache=cache, finish=jnp.where(full, decode.LENGTH, state.finish))
    cache, drafts, drafted = model.propose(state, before, jnp.where(runs, wanted, 0), implementation=implementation)
    logits, cache = _verify(model, cache, before, runs, state.tokens, drafts, drafted, implementation)

    def take(carry: tuple, scored: tuple) -> tuple[tuple, Decoded]:
        state, goes_on = carry
        logits, draft, place = scored
        state, made = decode.emit(state, logits, before + 1 + place, goes_on, num_logprobs=num_logprobs)
        return (state, goes_on & state.active & (place < drafted) & (state.tokens == draft)), made

    followed = jnp.concatenate([drafts.T, drafts.T[:1]])  # nothing is compared with the last one
    end, made = lax.scan(take, (state._replace(cache=cache), runs), (logits, followed, jnp.arange(followed.shape[0])))
    after = end[0]
    taken = after.num_produced - state.num_produced
    after = after._replace(cache=truncate(after.cache, before + taken))
    return after, jax.tree.map(lambda leaf: jnp.swapaxes(leaf[:, :, 0], 0, 1), made), DraftCounts(drafted, jnp.maximum(taken - 1, 0))


def _affordable(cache: KVCache, lengths: Int[Array, " S"], wanted: Int[Array, " S"]) -> Int[Array, " S"]:
    """The drafts that the pool has blocks for once every sequence has its `lengths`, in row order; all of a sequence's or none."""
    needed = blocks_needed(cache, lengths)
    more = blocks_needed(cache, lengths + wanted) - needed
    return jnp.where((more == 0) | (jnp.cumsum(more) <= cache.pool.num_free - jnp.sum(needed)), wanted, 0)


def _verify(
    model: Drafter,
    cache: KVCache,
    before: Int[Array, " S"],
    runs: Bool[Array, " S"],
    newest: Int[Array, " S"],
    drafts: Int[Array, "S k"],
    drafted: Int[Array, " S"],
    implementation: str | None,
) -> tuple[Float[Array, "k+1 S V"], KVCache]:
    """Scores of what follows each sequence's newest token and each of its drafts, from one pass over all of them."""
    tokens = jnp.concatenate([newest[:, None], drafts], axis=1)
    num_seqs, width = tokens.shape
    counts = jnp.where(runs, drafted + 1, 0)
    lengths = jnp.where(runs, before + counts, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    seq, position = query_places(lengths, starts, num_seqs * width)
    batch = tokens[seq, jnp.clip(position - before[seq], 0, width - 1)]
    hidden, cache = model.step(batch, cache, lengths, starts, implementation=implementation)
    rows = jnp.minimum(starts[None, :-1] + jnp.arange(width)[:, None], num_seqs * width - 1)
    return model.logits(hidden[rows.reshape(-1)]).reshape(width, num_seqs, -1), cache


def speculative_loop(
    model: Drafter,
    state: DecodeState,
    num_tokens: int,
    limits: Int[Array, " S"],
    until_end: Bool[Array, ""],
    *,
    num_logprobs: int | None = None,
    implementation: str | None = None,
) -> tuple[DecodeState, Decoded, DraftCounts]:
    """Decodes up to `num_tokens` tokens of every active sequence, as one loop of `speculative_step` on the device.

    Sequences advance at different speeds. The loop ends once the fastest has made as many tokens as any may, so that none stands idle
    for long; and where `jaxpage.decode_loop` would.

    Args:
      model: the model, with what guesses for it.
      state: the batch. Donate it under `jax.jit`.
      num_tokens: most tokens of a sequence, static: the width of the result.
      limits: most tokens of each sequence in this run, `num_tokens` at most; 0 for one that takes no part.
      until_end: the loop also ends once any sequence has.
      num_logprobs: see `decode_step`.
      implementation: see `jaxpage.paged_attention`.

    Returns:
      (state, tokens, counts of drafts).
    """
    step = functools.partial(speculative_step, model, num_logprobs=num_logprobs, implementation=implementation)
    shapes = jax.eval_shape(step, state, limits)[1]
    buffers = jax.tree.map(lambda leaf: jnp.full((leaf.shape[0], num_tokens, *leaf.shape[2:]), -1, leaf.dtype), shapes)
    rows = jnp.arange(limits.shape[0])[:, None]

    def unfinished(carry: tuple) -> Bool[Array, ""]:
        now, _, _ = carry
        made = now.num_produced - state.num_produced
        runs = now.active & (made < limits)
        goes_on = jnp.any(runs) & ~jnp.any(now.active & (made >= jnp.max(limits))) & ~jnp.any(decode.starved(now._replace(active=runs)))
        return goes_on & ~(until_end & jnp.any(state.active & ~now.active))

    def advance(carry: tuple) -> tuple:
        now, buffers, counts = carry
        made = now.num_produced - state.num_produced
        after, tokens, more = step(now, limits - made)
        place = jnp.arange(tokens.tokens.shape[1])[None]
        columns = jnp.where(place < (after.num_produced - now.num_produced)[:, None], made[:, None] + place, num_tokens)
        buffers = jax.tree.map(lambda buffer, some: buffer.at[rows, columns].set(some, mode="drop"), buffers, tokens)
        return after, buffers, jax.tree.map(jnp.add, counts, more)

    none = jnp.zeros_like(limits)
    return lax.while_loop(unfinished, advance, (state, buffers, DraftCounts(none, none)))
