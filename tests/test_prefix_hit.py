"""A sequence that starts from another's blocks equals one that computed them itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpage
from models import Decoder

PROMPT = [5, 17, 3, 88, 41, 9, 60, 22, 13]
CONFIG = jaxpage.CacheConfig(num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=16, block_size=4, max_seqs=2, max_blocks_per_seq=4)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.fixture(scope="module", params=[None, 2, 4, 7], ids=["full", "window 2", "window 4", "window 7"])
def model(request, tiny):
    """Decoders with full attention, and with windows smaller than a block, equal to it and not a multiple of it."""
    windows = None if request.param is None else (request.param,) * 2
    decoder = Decoder(dataclasses.replace(tiny.config, windows=windows), rngs=nnx.Rngs(0))
    return jax.tree.map(lambda weight: weight * 8 if weight.ndim == 2 else weight, decoder)


def prefilled(model, cache, row, tokens, start):
    """Row `row` runs tokens whose first one has position `start`."""
    lengths = np.zeros(2, np.int32)
    lengths[row] = start + len(tokens)
    cache, ok = jaxpage.reserve(cache, jnp.maximum(jnp.asarray(lengths), cache.table.lengths))
    assert ok.all()
    starts = ints(0, len(tokens) if row == 0 else 0, len(tokens))
    return jaxpage.prefill(model, cache, ints(*tokens), jnp.asarray(lengths), starts)[0]


def next_logits(model, cache, row, token):
    """Logits after one more token, and the cache with it."""
    lengths = cache.table.lengths
    cache, ok = jaxpage.reserve(cache, lengths.at[row].add(1), max_new_blocks=1)
    assert ok[row]
    active = jnp.where(jnp.arange(2) == row, cache.table.lengths, 0)
    hidden, cache = model.step(jnp.full(2, token, jnp.int32), cache, active)
    return np.asarray(model.logits(hidden))[row], cache


@pytest.mark.parametrize("hit", [1, 3, 4, 5, 7, 8])
def test_a_hit_equals_a_miss(model, hit):
    """Also where the hit ends inside a block, and where it covers all of the prompt but the token that must be computed."""
    cache = prefilled(model, jaxpage.init_cache(CONFIG), 0, PROMPT[:-1], 0)
    cache, ok = jaxpage.attach(cache, jnp.int32(1), cache.table.blocks[0], jnp.int32(hit))
    assert ok
    if hit < len(PROMPT) - 1:
        cache = prefilled(model, cache, 1, PROMPT[hit:-1], hit)
    jaxpage.check_cache(cache)
    assert cache.table.lengths.tolist() == [8, 8]
    expected = np.asarray(model(jnp.asarray([PROMPT])))[0, -1]
    for row in (1, 0):  # the one that shares first: what it writes must not reach the other
        logits, cache = next_logits(model, cache, row, PROMPT[-1])
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    jaxpage.check_cache(cache)


def test_owners_of_one_prefix_go_their_own_ways(model):
    cache = prefilled(model, jaxpage.init_cache(CONFIG), 0, PROMPT[:6], 0)
    cache = jaxpage.fork(cache, ints(0), ints(1))
    for row, token in ((0, 30), (1, 31)):
        logits, cache = next_logits(model, cache, row, token)
        expected = np.asarray(model(jnp.asarray([[*PROMPT[:6], token]])))[0, -1]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert jaxpage.usage(cache).blocks_used == 3  # one full block shared, a partial one each
