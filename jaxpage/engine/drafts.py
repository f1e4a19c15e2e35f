"""Where the drafts of speculative decoding come from: the sequence's own text, or a small model."""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpage.config import CacheConfig
from jaxpage.decode import DecodeState
from jaxpage.kv_cache import KVCache, init_cache
from jaxpage.model import CausalModel, ModelSizes
from jaxpage.sampling import count_tokens, sample

__all__ = ["DraftModel", "Drafter", "PromptLookup", "Speculation", "look_up", "with_drafts"]

_FEWEST = 2  # a single token that occurred before tells little about the next


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How tokens are guessed ahead: by a draft model where the engine has one, else by prompt lookup.

    Attributes:
      num_drafts: most tokens guessed for a sequence and step (k). Each step computes so many more rows for every sequence.
      ngram: prompt lookup goes on from where the last `ngram` tokens occurred before, or else fewer, down to 2.
    """

    num_drafts: int = 4
    ngram: int = 3

    def __post_init__(self) -> None:
        for name, high in (("num_drafts", 64), ("ngram", 16)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
                raise ValueError(f"{name} must be an integer from 1 to {high}, got {value!r}")


@runtime_checkable
class Drafter(CausalModel, Protocol):
    """A causal model that also guesses what it will say. Guesses cost time when they are bad, never right output."""

    @property
    def num_drafts(self) -> int:
        """Most drafts of a sequence and step (k), static."""

    def prepare(self, state: DecodeState, config: CacheConfig, backend: str | None) -> DecodeState:
        """Adds to an empty state what the drafts need to be kept of each sequence."""

    def propose(
        self, state: DecodeState, lengths: Int[Array, " S"], most: Int[Array, " S"], *, implementation: str | None = None
    ) -> tuple[KVCache, Int[Array, "S k"], Int[Array, " S"]]:
        """Guesses what follows each sequence's newest token.

        Args:
          state: the batch; its cache has room for the newest tokens and `most` drafts after them.
          lengths: tokens whose keys and values the cache holds.
          most: most drafts of each sequence, at most k.
          implementation: see `jaxpage.paged_attention`.

        Returns:
          (cache, drafts, how many of each row are drafts): the cache's tables stay as they are.
        """


@dataclasses.dataclass(frozen=True)
class _WithModel:
    """The model that drafts are for. It computes tokens as it does alone."""

    model: CausalModel
    num_drafts: int

    @property
    def config(self) -> ModelSizes:
        """The model's."""
        return self.model.config

    def step(
        self,
        tokens: Int[Array, " T"],
        cache: KVCache,
        lengths: Int[Array, " S"],
        query_starts: Int[Array, " S+1"] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T hidden"], KVCache]:
        """The model's."""
        return self.model.step(tokens, cache, lengths, query_starts, implementation=implementation)

    def logits(self, hidden: Float[Array, "T hidden"]) -> Float[Array, "T V"]:
        """The model's."""
        return self.model.logits(hidden)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("model",), meta_fields=("num_drafts", "ngram"))
@dataclasses.dataclass(frozen=True)
class PromptLookup(_WithModel):
    """Guesses that a sequence goes on as it did where its last tokens occurred before (Saxena, 2023)."""

    ngram: int

    def prepare(self, state: DecodeState, config: CacheConfig, backend: str | None) -> DecodeState:
        """See `Drafter`: each sequence's tokens."""
        return state._replace(history=jnp.zeros((config.max_seqs, config.max_blocks_per_seq * config.block_size), jnp.int32))

    def propose(
        self, state: DecodeState, lengths: Int[Array, " S"], most: Int[Array, " S"], *, implementation: str | None = None
    ) -> tuple[KVCache, Int[Array, "S k"], Int[Array, " S"]]:
        """See `Drafter`."""
        assert state.history is not None
        drafts, found = look_up(state.history, lengths, self.ngram, self.num_drafts)
        return state.cache, drafts, jnp.where(found, most, 0)


def look_up(history: Int[Array, "S W"], last: Int[Array, " S"], ngram: int, num_drafts: int) -> tuple[Int[Array, "S k"], Int[Array, " S"]]:
    """What followed the last tokens of each sequence where they occurred before: most of them count more, then the latest place.

    Args:
      history: each sequence's tokens.
      last: the place of its newest one; what lies behind means nothing.
      ngram: most tokens that are compared.
      num_drafts: tokens wanted (k). Where fewer have followed, they are taken to repeat.

    Returns:
      (tokens, whether there was such a place).
    """
    rows, places = jnp.arange(history.shape[0])[:, None], jnp.arange(history.shape[1])[None]
    last = last[:, None]
    same = jnp.ones(history.shape, bool)
    count = jnp.zeros(history.shape, jnp.int32)
    for back in range(ngram):  # tokens that agree, counted from each place and the newest token backwards
        earlier = jnp.roll(history, back, axis=1)
        newest = history.at[rows, last - back].get(mode="fill", fill_value=-1)
        same &= (earlier == newest) & (places >= back)
        count += same
    count = jnp.where((places < last) & (count >= min(_FEWEST, ngram)), count, 0)
    best = jnp.max(count, axis=1, keepdims=True)
    place = jnp.max(jnp.where(count == best, places, -1), axis=1, keepdims=True)
    ahead = jnp.arange(num_drafts)[None] % jnp.maximum(last - place, 1)
    return history.at[rows, place + 1 + ahead].get(mode="clip"), best[:, 0] > 0


@functools.partial(jax.tree_util.register_dataclass, data_fields=("model", "draft"), meta_fields=("num_drafts",))
@dataclasses.dataclass(frozen=True)
class DraftModel(_WithModel):
    """A model with a smaller one that guesses for it (Leviathan et al., 2023).

    The small model's keys and values are further layers of the same cache, after the model's own: whatever is done to a block, sharing,
    copying, swapping, is done to both.
    """

    draft: CausalModel

    def step(
        self,
        tokens: Int[Array, " T"],
        cache: KVCache,
        lengths: Int[Array, " S"],
        query_starts: Int[Array, " S+1"] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T hidden"], KVCache]:
        """The model's; the small model sees the same tokens."""
        own = self.config.num_layers
        hidden, cache_of_model = super().step(
            tokens, cache._replace(storage=cache.storage[:own]), lengths, query_starts, implementation=implementation
        )
        _, cache_of_draft = self.draft.step(
            tokens, cache._replace(storage=cache.storage[own:]), lengths, query_starts, implementation=implementation
        )
        return hidden, cache._replace(storage=cache_of_model.storage + cache_of_draft.storage)

    def prepare(self, state: DecodeState, config: CacheConfig, backend: str | None) -> DecodeState:
        """See `Drafter`: the small model's layers."""
        sizes = self.draft.config
        layers = dataclasses.replace(config, num_layers=sizes.num_layers, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim)
        storage = state.cache.storage + init_cache(layers, backend).storage
        return state._replace(cache=state.cache._replace(storage=storage))

    def propose(
        self, state: DecodeState, lengths: Int[Array, " S"], most: Int[Array, " S"], *, implementation: str | None = None
    ) -> tuple[KVCache, Int[Array, "S k"], Int[Array, " S"]]:
        """See `Drafter`. The small model draws with the sequence's own parameters and the keys that the tokens themselves will have."""
        own = self.config.num_layers

        def advance(carry: tuple, step: Int[Array, ""]) -> tuple[tuple, Int[Array, " S"]]:
            cache, sampler, tokens = carry
            runs = step < most
            now = lengths + 1 + step
            hidden, cache = self.draft.step(tokens, cache, jnp.where(runs, now, 0), implementation=implementation)
            tokens = sample(self.draft.logits(hidden), sampler, now, state.num_produced + step)
            return (cache, count_tokens(sampler, tokens, runs), tokens), tokens

        start = (state.cache._replace(storage=state.cache.storage[own:]), state.sampler, state.tokens)
        (cache, _, _), drafts = lax.scan(advance, start, jnp.arange(self.num_drafts))
        return state.cache._replace(storage=state.cache.storage[:own] + cache.storage), drafts.T, most


def with_drafts(model: CausalModel, draft_model: CausalModel | None, speculation: Speculation | None) -> CausalModel:
    """The model, with what guesses for it where that is wanted.

    Raises:
      ValueError: a draft model without speculation, or one of another vocabulary or with a shorter context.
    """
    if draft_model is None:
        return model if speculation is None else PromptLookup(model, speculation.num_drafts, speculation.ngram)
    if speculation is None:
        raise ValueError("a draft model needs `speculation` in the options: how many tokens it drafts")
    ours, theirs = model.config, draft_model.config
    if theirs.vocab_size != ours.vocab_size:
        raise ValueError(f"the draft model must have the model's vocabulary of {ours.vocab_size} tokens, got {theirs.vocab_size}")
    return DraftModel(model, speculation.num_drafts, draft_model)
