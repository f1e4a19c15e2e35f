"""The engine's two programs: one ragged pass that mixes prompts and decodes, and a loop of decode steps. Both change rows in place."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpage import decode
from jaxpage.decode import Decoded, DecodeState
from jaxpage.engine.drafts import Drafter
from jaxpage.engine.speculate import DraftCounts, speculative_loop
from jaxpage.kv_cache import reserve
from jaxpage.model import CausalModel
from jaxpage.sampling import Sampler
from pallas_kernels.ragged import query_places

__all__ = ["Batch", "Made", "decode_rows", "mixed_pass", "place"]


class Batch(NamedTuple):
    """A ragged batch of one pass, as the host plans it.

    A sequence either decodes, with one row whose token the device knows (-1), or computes a part of its known tokens.
    """

    tokens: Int[Array, " T"]
    query_starts: Int[Array, " S+1"]
    known: Bool[Array, " S"]  # its tokens are named
    samples: Bool[Array, " S"]  # the next token is sampled from its last row
    targets: Int[Array, " T"]  # the token after each row, to be scored; -1 for none


class Made(NamedTuple):
    """What a pass made. Blocks are those that the new keys and values went to."""

    decoded: Decoded
    counts: Int[Array, " R"]  # tokens each row sampled
    finish: Int[Array, " R"]
    blocks: Int[Array, "..."]  # mixed pass: [T], of each row of the batch; decode rows: [R, W], of the new tokens' blocks in order
    scores: Float[Array, " T"] | None = None  # log-probabilities of the targets
    drafts: DraftCounts | None = None


def mixed_pass(
    model: CausalModel, state: DecodeState, batch: Batch, *, num_logprobs: int | None = None, implementation: str | None = None
) -> tuple[DecodeState, Made]:
    """Computes parts of prompts and one token of decoding sequences in one pass.

    Args:
      model: the model.
      state: all rows; the pool must have the blocks that the batch takes.
      batch: what to compute.
      num_logprobs: see `decode_step`.
      implementation: see `jaxpage.paged_attention`.
    """
    table, size = state.cache.table, state.cache.block_size
    counts = jnp.diff(batch.query_starts)
    runs = (counts > 0) & (batch.known | state.active)
    num_rows = batch.tokens.shape[0]
    cache, ok = reserve(state.cache, table.lengths + jnp.where(runs, counts, 0), max_new_blocks=-(-num_rows // size) + 1)
    runs &= ok
    lengths = jnp.where(runs, cache.table.lengths, 0)
    seq, position = query_places(lengths, batch.query_starts, num_rows)
    tokens = jnp.where(batch.tokens < 0, state.tokens[seq], batch.tokens)
    hidden, cache = model.step(tokens, cache, lengths, batch.query_starts, implementation=implementation)
    last = jnp.maximum(batch.query_starts[1:] - 1, 0)
    before = state.num_produced
    state, decoded = decode.emit(
        state._replace(cache=cache), model.logits(hidden[last]), lengths, runs & batch.samples, num_logprobs=num_logprobs
    )
    blocks = jnp.where(position >= 0, cache.table.blocks[seq, jnp.maximum(position, 0) // size], 0)
    scores = lax.cond(
        jnp.any(batch.targets >= 0), lambda: decode.score_rows(model, hidden, jnp.maximum(batch.targets, 0)), lambda: jnp.zeros(num_rows)
    )
    return state, Made(decoded, state.num_produced - before, state.finish, blocks, scores)


def decode_rows(
    model: CausalModel,
    state: DecodeState,
    limits: Int[Array, " R"],
    until_end: Bool[Array, ""],
    *,
    num_rows: int,
    num_steps: int,
    num_logprobs: int | None = None,
    implementation: str | None = None,
) -> tuple[DecodeState, Made]:
    """Decodes up to `limits` tokens of the first `num_rows` rows (R); see `jaxpage.decode_loop` and `speculative_loop`."""
    some = _first(state, num_rows)
    size, drafts = state.cache.block_size, None
    if isinstance(model, Drafter):
        end, decoded, drafts = speculative_loop(
            model, some, num_steps, limits, until_end, num_logprobs=num_logprobs, implementation=implementation
        )
    else:
        end, decoded, _ = decode.decode_loop(
            model, some, num_steps, jnp.max(limits), until_end, num_logprobs=num_logprobs, implementation=implementation
        )
    columns = some.cache.table.lengths[:, None] // size + jnp.arange(-(-num_steps // size) + 1)[None]
    blocks = jnp.take_along_axis(end.cache.table.blocks, columns, axis=1, mode="fill", fill_value=0)
    return _with_first(state, end), Made(decoded, end.num_produced - some.num_produced, end.finish, blocks, drafts=drafts)


def _first(state: DecodeState, count: int) -> DecodeState:
    """The first rows, with all of pool and storage."""
    table = jax.tree.map(lambda leaf: leaf[:count], state.cache.table)
    rows = jax.tree.map(lambda leaf: leaf[:count], state[1:])
    return DecodeState(state.cache._replace(table=table), *rows)


def _with_first(state: DecodeState, first: DecodeState) -> DecodeState:
    """The state with its first rows, pool and storage from another."""

    def update(rows: Array, some: Array) -> Array:
        return rows.at[: some.shape[0]].set(some)

    table = jax.tree.map(update, state.cache.table, first.cache.table)
    return DecodeState(first.cache._replace(table=table), *jax.tree.map(update, state[1:], first[1:]))


def place(
    state: DecodeState,
    row: Int[Array, ""],
    sampler: Sampler,
    num_produced: Int[Array, ""],
    token: Int[Array, ""],
    history: Int[Array, " W"] | None = None,
) -> DecodeState:
    """Gives a row to a sequence.

    Args:
      state: all rows.
      row: the row.
      sampler: the sequence's parameters, as a batch of one.
      num_produced: tokens it has produced before.
      token: its newest token where only that is left to compute, so that it decodes from here on; -1 where more is.
      history: its tokens, where the state keeps them.
    """
    return state._replace(
        sampler=jax.tree.map(lambda rows, one: rows.at[row].set(one[0]), state.sampler, sampler),
        tokens=state.tokens.at[row].set(token),
        active=state.active.at[row].set(token >= 0),
        num_produced=state.num_produced.at[row].set(num_produced),
        finish=state.finish.at[row].set(decode.RUNNING),
        history=None if state.history is None else state.history.at[row].set(history),
    )
