"""Decode steps to be timed: a batch with random contents, and a function that decodes from it.

Cache contents are random: a step's time does not depend on them. Blocks are handed out in shuffled order.
"""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpage
from experiments.measure import SIZES
from jaxpage.sampler_arrays import Features, build_sampler
from models import Decoder

__all__ = ["Batch", "decoder", "start", "stepper"]


class Batch(NamedTuple):
    """What is decoded.

    Attributes:
      model: whose sizes the decoder has, a name in `SIZES`.
      dtype: of weights and cache.
      seqs: sequences at a time.
      context: tokens each holds before the first step.
      steps: decode steps of one run.
      seed: of weights, cache contents and block order.
    """

    model: str
    dtype: str
    seqs: int
    context: int
    steps: int
    seed: int


@functools.lru_cache(maxsize=1)
def decoder(model: str, dtype: str, seed: int) -> Decoder:
    """A decoder with random weights; the last one is kept, because it is slow to make."""
    return Decoder(SIZES[model], dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))


def cache_config(batch: Batch, block_size: int | None) -> jaxpage.CacheConfig:
    """Sizes of a cache with room for all tokens of all steps; a block size of None is one contiguous reservation a sequence."""
    sizes = SIZES[batch.model]
    length = batch.context + batch.steps
    # One block of the whole length for each sequence is what `CacheConfig.contiguous` makes.
    size = length if block_size is None else block_size
    width = -(-length // size)
    return jaxpage.CacheConfig(
        num_layers=sizes.num_layers,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        num_blocks=batch.seqs * width + 1,
        block_size=size,
        max_seqs=batch.seqs,
        max_blocks_per_seq=width,
        dtype=batch.dtype,
    )


def filled_cache(config: jaxpage.CacheConfig, context: int, seed: int) -> jaxpage.KVCache:
    """A cache whose sequences hold so many tokens of random keys and values, in blocks of shuffled order."""
    cache = jaxpage.init_cache(config)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(np.arange(1, config.num_blocks)), [0]]).astype(np.int32)
    keys = iter(jax.random.split(jax.random.key(seed), 2 * config.num_layers))
    storage = jax.tree.map(lambda array: jax.random.normal(next(keys), array.shape, array.dtype), cache.storage)
    cache = cache._replace(storage=storage, pool=cache.pool._replace(free=jnp.asarray(order)))
    cache, ok = jax.jit(jaxpage.reserve, donate_argnums=0)(cache, jnp.full(config.max_seqs, context, jnp.int32))
    assert bool(ok.all())
    return cache


def start(batch: Batch, block_size: int | None) -> jaxpage.DecodeState:
    """A batch before its first step; see `cache_config` for the block size."""
    cache = filled_cache(cache_config(batch, block_size), batch.context, batch.seed)
    vocab_size = SIZES[batch.model].vocab_size
    params = [jaxpage.SamplingParams(max_tokens=2**30, ignore_eos=True)] * batch.seqs
    sampler = build_sampler(
        params,
        [[0]] * batch.seqs,
        Features.of(params, ()),
        num_seqs=batch.seqs,
        vocab_size=vocab_size,
        eos_ids=(),
        max_tokens=[2**30] * batch.seqs,
    )
    tokens = np.random.default_rng(batch.seed).integers(0, vocab_size, batch.seqs)
    return jaxpage.init_state(cache, sampler, jnp.asarray(tokens, jnp.int32), jnp.ones(batch.seqs, bool))


def _rewound(state: jaxpage.DecodeState, context: int) -> jaxpage.DecodeState:
    """The state as it was before the steps; the blocks of the new tokens go back to the pool."""
    return state._replace(cache=jaxpage.truncate(state.cache, jnp.full_like(state.cache.table.lengths, context)))


def stepper(batch: Batch, state: jaxpage.DecodeState, implementation: str) -> Callable[[], float]:
    """A function that decodes the steps and returns the seconds one takes."""
    model = decoder(batch.model, batch.dtype, batch.seed)
    loop = jax.jit(lambda model, state: jaxpage.decode_loop(model, state, batch.steps, implementation=implementation), donate_argnums=1)
    rewind = jax.jit(lambda state: _rewound(state, batch.context), donate_argnums=0)
    held = [state]

    def measure() -> float:
        held[0] = jax.block_until_ready(rewind(held[0]))
        begin = time.perf_counter()
        held[0], made, _ = jax.block_until_ready(loop(model, held[0]))
        seconds = (time.perf_counter() - begin) / batch.steps
        assert bool((made.tokens >= 0).all())
        return seconds

    return measure
