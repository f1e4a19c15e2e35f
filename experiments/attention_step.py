"""One layer's decode attention, to be timed alone."""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxpage
from experiments.decode_step import Batch, cache_config, filled_cache
from experiments.measure import SIZES

__all__ = ["attention_stepper"]


def attention_stepper(batch: Batch, block_size: int) -> Callable[[], float]:
    """A function that runs one layer's attention `batch.steps` times and returns the seconds it takes once, the write included."""
    sizes = SIZES[batch.model]
    cache = filled_cache(dataclasses.replace(cache_config(batch, block_size), num_layers=1), batch.context, batch.seed)
    keys = jax.random.split(jax.random.key(batch.seed), 3)
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    dtype = jnp.dtype(batch.dtype)
    q, k, v = (jax.random.normal(key, (batch.seqs, count, sizes.head_dim), dtype) for key, count in zip(keys, heads, strict=True))

    def repeat(q: jax.Array, k: jax.Array, v: jax.Array, cache: jaxpage.KVCache) -> tuple[jax.Array, jaxpage.KVCache]:
        def once(_: int, carry: tuple) -> tuple:
            queries, storage = carry
            table = cache.table
            return jaxpage.paged_attention(
                queries, k, v, storage, table.blocks, table.lengths, scale=sizes.head_dim**-0.5, implementation="xla"
            )

        # Outputs are the next queries, so that no round can be left out.
        out, storage = jax.lax.fori_loop(0, batch.steps, once, (q, cache.storage[0]))
        return out, cache._replace(storage=(storage,))

    run = jax.jit(repeat, donate_argnums=3)
    held = [cache]

    def measure() -> float:
        begin = time.perf_counter()
        _, held[0] = jax.block_until_ready(run(q, k, v, held[0]))
        return (time.perf_counter() - begin) / batch.steps

    return measure
