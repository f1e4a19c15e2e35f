"""The operations on the cache: what each does to pool, table and storage, and what it refuses.

All of them run as they do in a decode loop: compiled, with the cache donated.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpage
from jaxpage import block_pool, kv_cache
from jaxpage.sampling import Sampler
from pallas_kernels import layout, xla

jitted = functools.partial(jax.jit, donate_argnums=0)
reserve = jitted(jaxpage.reserve, static_argnames="max_new_blocks")
release, fork, truncate, attach = map(jitted, (jaxpage.release, jaxpage.fork, jaxpage.truncate, jaxpage.attach))
hold = jitted(lambda cache, blocks: cache._replace(pool=block_pool.hold(cache.pool, blocks)))
drop = jitted(lambda cache, blocks: cache._replace(pool=block_pool.drop(cache.pool, blocks)))

SIZES = types.MappingProxyType(
    {"num_layers": 2, "num_kv_heads": 1, "head_dim": 2, "num_blocks": 9, "block_size": 4, "max_seqs": 4, "max_blocks_per_seq": 4}
)


def empty(**sizes):
    return jaxpage.init_cache(jaxpage.CacheConfig(**(SIZES | sizes)), "xla")


def ints(*values):
    return jnp.array(values, jnp.int32)


def mask(*rows):
    return jnp.array([row in rows for row in range(SIZES["max_seqs"])])


def table(cache):
    """The blocks of each row, without the null entries."""
    return [[int(block) for block in row if block] for row in np.asarray(cache.table.blocks)]


def lengths(cache):
    return np.asarray(cache.table.lengths).tolist()


def refs(cache):
    return np.asarray(cache.pool.refs).tolist()


def filled(cache, seed=0):
    """The cache with random storage, another for each layer."""
    keys = jax.random.split(jax.random.key(seed), 2 * len(cache.storage))
    leaves, structure = jax.tree.flatten(cache.storage)
    return cache._replace(
        storage=jax.tree.unflatten(structure, [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])
    )


def stored(cache):
    """Logical keys and values of every layer on the host: [2 * layers, N, B, K, D]."""
    return np.stack([np.asarray(side) for layer in cache.storage for side in layout.unpack(layer)])


def grown(*new_lengths, **sizes):
    """A fresh cache whose rows hold so many tokens."""
    cache, ok = reserve(empty(**sizes), ints(*new_lengths))
    assert ok.all()
    return cache


def state(cache):
    """A copy of all that a refusal must leave as it was."""
    return jax.tree.map(np.array, (cache.pool, cache.table, cache.storage))


def unchanged(before, cache):
    jax.tree.map(np.testing.assert_array_equal, before, state(cache))


# Reserving


def test_blocks_are_handed_out_in_order():
    cache = grown(5, 0, 9, 1)
    assert table(cache) == [[1, 2], [], [3, 4, 5], [6]]
    assert lengths(cache) == [5, 0, 9, 1]
    assert int(cache.pool.num_free) == 2
    jaxpage.check_cache(cache)


def test_growing_appends_to_the_blocks_a_row_has():
    cache, ok = reserve(grown(5, 0, 3, 0), ints(9, 0, 4, 2))
    assert ok.all()
    assert table(cache) == [[1, 2, 4], [], [3], [5]]
    jaxpage.check_cache(cache)


def test_a_prompt_of_exactly_one_block_takes_a_second_for_the_next_token():
    """An off-by-one at the block's end would assert, write past the block, or take the second block too early."""
    cache = grown(4, 0, 0, 0)
    assert table(cache)[0] == [1]
    assert np.asarray(kv_cache.blocks_needed(cache, ints(4, 0, 0, 0))).tolist() == [0, 0, 0, 0]
    assert np.asarray(kv_cache.blocks_needed(cache, ints(5, 0, 0, 0))).tolist() == [1, 0, 0, 0]
    cache, ok = reserve(cache, ints(5, 0, 0, 0), max_new_blocks=1)
    assert ok.all()
    assert table(cache)[0] == [1, 2]
    cache, _ = reserve(cache, ints(8, 0, 0, 0), max_new_blocks=1)
    assert table(cache)[0] == [1, 2]
    jaxpage.check_cache(cache)


def test_a_row_gets_all_it_needs_or_nothing():
    cache, ok = reserve(grown(4, 0, 0, 0), ints(4, 16, 13, 0))
    assert ok.tolist() == [True, True, False, True]
    assert table(cache) == [[1], [2, 3, 4, 5], [], []]
    assert lengths(cache) == [4, 16, 0, 0]
    assert int(cache.pool.num_free) == 3
    jaxpage.check_cache(cache)


def test_a_row_that_lacks_blocks_is_not_overtaken():
    cache, ok = reserve(grown(16, 0, 0, 0), ints(16, 9, 8, 4))
    assert ok.tolist() == [True, True, False, False]  # one block is left, and row 2 is first in line for two
    assert table(cache) == [[1, 2, 3, 4], [5, 6, 7], [], []]
    jaxpage.check_cache(cache)


def test_a_row_with_room_in_its_own_block_does_not_wait_for_one_that_lacks_blocks():
    cache, ok = reserve(grown(16, 8, 3, 1), ints(16, 9, 4, 1))
    assert ok.tolist() == [True, False, True, True]
    assert lengths(cache) == [16, 8, 4, 1]
    jaxpage.check_cache(cache)


def test_a_row_that_can_never_fit_takes_no_place_in_line():
    cache, ok = reserve(grown(0, 0, 0, 0), ints(17, 16, 16, 2**31 - 1))
    assert ok.tolist() == [False, True, True, False]
    assert table(cache) == [[], [1, 2, 3, 4], [5, 6, 7, 8], []]
    jaxpage.check_cache(cache)


def test_max_new_blocks_bounds_each_row():
    cache, ok = reserve(grown(0, 0, 0, 0), ints(5, 4, 1, 0), max_new_blocks=1)
    assert ok.tolist() == [False, True, True, True]
    assert table(cache) == [[], [1], [2], []]
    cache, ok = reserve(cache, ints(8, 12, 1, 0), max_new_blocks=2)
    assert ok.tolist() == [True, True, True, True]
    assert table(cache) == [[3, 4], [1, 5, 6], [2], []]
    jaxpage.check_cache(cache)


def test_a_shorter_length_reserves_nothing():
    cache = grown(5, 3, 0, 0)
    before = state(cache)
    cache, ok = reserve(cache, ints(2, 3, 0, -7))
    assert ok.all()
    unchanged(before, cache)


# Sharing and copying


def test_the_first_write_after_a_fork_copies_the_partial_block_in_every_layer():
    cache = fork(filled(grown(6, 0, 0, 0)), ints(0), ints(1))
    assert table(cache) == [[1, 2], [1, 2], [], []]
    before = stored(cache)
    assert np.asarray(kv_cache.blocks_needed(cache, ints(6, 7, 0, 0))).tolist() == [0, 1, 0, 0]
    cache, ok = reserve(cache, ints(6, 7, 0, 0), max_new_blocks=1)
    assert ok.all()
    assert table(cache) == [[1, 2], [1, 3], [], []]
    assert refs(cache)[1:4] == [2, 1, 1]
    after = stored(cache)
    np.testing.assert_array_equal(after[:, 3], before[:, 2])
    np.testing.assert_array_equal(np.delete(after, 3, axis=1), np.delete(before, 3, axis=1))
    jaxpage.check_cache(cache)


def test_a_copy_and_new_blocks_come_in_one_call():
    cache = fork(filled(grown(6, 0, 0, 0)), ints(0), ints(1))
    before = stored(cache)
    cache, ok = reserve(cache, ints(6, 13, 2, 0))
    assert ok.all()
    assert table(cache) == [[1, 2], [1, 3, 4, 5], [6], []]
    np.testing.assert_array_equal(stored(cache)[:, 3], before[:, 2])
    jaxpage.check_cache(cache)


def test_all_owners_growing_at_once_get_blocks_of_their_own():
    cache = fork(filled(grown(6, 0, 0, 0)), ints(0, 0, 0), ints(1, 2, 3))
    before = stored(cache)
    cache, ok = reserve(cache, ints(7, 7, 7, 7), max_new_blocks=1)
    assert ok.all()
    tails = [row[1] for row in table(cache)]
    assert len(set(tails)) == 4
    for tail in tails:
        np.testing.assert_array_equal(stored(cache)[:, tail], before[:, 2])
    assert [refs(cache)[tail] for tail in tails] == [1, 1, 1, 1]
    jaxpage.check_cache(cache)


def test_the_last_owner_of_a_partial_block_writes_in_place():
    cache = release(fork(grown(6, 0, 0, 0), ints(0), ints(1)), mask(0))
    cache, ok = reserve(cache, ints(0, 7, 0, 0))
    assert ok.all()
    assert table(cache) == [[], [1, 2], [], []]
    jaxpage.check_cache(cache)


def test_a_full_shared_block_is_not_copied():
    cache = fork(filled(grown(8, 0, 0, 0)), ints(0), ints(1))
    before = stored(cache)
    cache, ok = reserve(cache, ints(8, 9, 0, 0))
    assert ok.all()
    assert table(cache) == [[1, 2], [1, 2, 3], [], []]
    np.testing.assert_array_equal(stored(cache), before)
    jaxpage.check_cache(cache)


def test_a_row_cut_back_into_a_shared_block_copies_it_before_writing():
    """Shortened into a full block that another row still reads, the row must not overwrite the other's tokens."""
    cache = truncate(fork(filled(grown(8, 0, 0, 0)), ints(0), ints(1)), ints(8, 6, 0, 0))
    before = stored(cache)
    cache, ok = reserve(cache, ints(8, 7, 0, 0))
    assert ok.all()
    assert table(cache) == [[1, 2], [1, 3], [], []]
    np.testing.assert_array_equal(stored(cache)[:, 3], before[:, 2])
    jaxpage.check_cache(cache)


def test_a_copy_that_finds_no_block_is_refused():
    cache = fork(filled(grown(6, 0, 16, 8)), ints(0), ints(1))
    before = state(cache)
    cache, ok = reserve(cache, ints(6, 7, 16, 8), max_new_blocks=1)
    assert ok.tolist() == [True, False, True, True]
    unchanged(before, cache)


# Releasing


def test_released_blocks_are_handed_out_again_the_last_first():
    cache = release(grown(8, 4, 8, 0), mask(1, 0))
    assert table(cache) == [[], [], [4, 5], []]
    assert lengths(cache) == [0, 0, 8, 0]
    jaxpage.check_cache(cache)
    cache, _ = reserve(cache, ints(4, 0, 8, 12))
    assert table(cache) == [[3], [], [4, 5], [2, 1, 6]]


def test_releasing_twice_frees_once():
    cache = release(grown(8, 4, 0, 0), mask(0))
    before = state(cache)
    cache = release(cache, mask(0))
    unchanged(before, cache)
    assert int(cache.pool.num_free) == 7


def test_a_block_named_twice_is_freed_once():
    """Two entries for the same free block would hand it out to two sequences."""
    pool = block_pool.take(block_pool.init_pool(6), ints(1, 2), 2)
    pool = jax.jit(block_pool.drop)(pool, ints(2, 2, 0, 2))
    assert (int(pool.num_free), pool.refs.tolist()) == (4, [0, 1, 0, 0, 0, 0])
    assert sorted(pool.free[:4].tolist()) == [2, 3, 4, 5]
    again = jax.jit(block_pool.drop)(pool, ints(2, 2, 5, -1))
    jax.tree.map(np.testing.assert_array_equal, pool, again)


def test_references_add_up_over_names():
    cache = hold(grown(4, 0, 0, 0), ints(1, 1, 0))
    assert refs(cache)[1] == 3
    jaxpage.check_cache(cache, holds=np.array([1, 1]))
    cache = drop(release(cache, mask(0)), ints(1, 0, 0))
    assert (refs(cache)[1], int(cache.pool.num_free)) == (1, 7)
    cache = drop(cache, ints(1, 0, 0))
    assert int(cache.pool.num_free) == 8
    jaxpage.check_cache(cache)


def test_a_pool_that_fits_one_batch_serves_any_number_in_turn():
    """References that are never dropped would run the pool dry after the first batch."""
    cache = empty()
    for _ in range(10):
        cache, ok = reserve(cache, ints(16, 13, 0, 0))
        assert ok.all()
        cache = release(cache, mask(0, 1))
        assert int(cache.pool.num_free) == 8
    jaxpage.check_cache(cache)


# Forking


def test_fork_permutes_rows_as_beam_search_does():
    cache = filled(grown(6, 5, 1, 0))
    before = stored(cache)
    cache = fork(cache, ints(1, 0, 0), ints(0, 1, 2))
    assert table(cache) == [[3, 4], [1, 2], [1, 2], []]
    assert lengths(cache) == [5, 6, 6, 0]
    assert refs(cache)[1:6] == [2, 2, 1, 1, 0]
    np.testing.assert_array_equal(stored(cache), before)
    jaxpage.check_cache(cache)


def test_fork_onto_a_row_releases_what_it_held():
    cache = fork(grown(6, 9, 0, 0), ints(0), ints(1))
    assert table(cache) == [[1, 2], [1, 2], [], []]
    assert int(cache.pool.num_free) == 6
    jaxpage.check_cache(cache)


def test_fork_between_rows_that_share_keeps_the_shared_blocks():
    cache = fork(grown(6, 0, 0, 0), ints(0), ints(1))
    cache, _ = reserve(cache, ints(6, 9, 0, 0))
    cache = fork(cache, ints(1), ints(0))
    assert table(cache)[0] == table(cache)[1] == [1, 3, 4]
    assert refs(cache)[1:5] == [2, 0, 2, 2]
    jaxpage.check_cache(cache)


def test_fork_of_an_empty_row_empties_the_target():
    cache = fork(grown(6, 9, 0, 0), ints(3), ints(1))
    assert table(cache) == [[1, 2], [], [], []]
    jaxpage.check_cache(cache)


@pytest.mark.parametrize(("source", "target"), [(-1, 1), (0, -1), (4, 1), (0, 4), (0, 0), (2, 2)])
def test_fork_passes_over_padding_and_self(source, target):
    cache = grown(6, 9, 0, 0)
    before = state(cache)
    unchanged(before, fork(cache, ints(source), ints(target)))


# Truncating


def test_truncate_frees_the_blocks_a_row_no_longer_reaches():
    cache = truncate(grown(16, 9, 0, 0), ints(5, 8, 0, 0))
    assert table(cache) == [[1, 2], [5, 6], [], []]
    assert lengths(cache) == [5, 8, 0, 0]
    assert int(cache.pool.num_free) == 4
    jaxpage.check_cache(cache)


def test_truncate_to_no_tokens_and_below_empties_rows():
    cache = truncate(grown(8, 9, 0, 0), ints(0, -3, 0, -1))
    assert table(cache) == [[], [], [], []]
    assert lengths(cache) == [0, 0, 0, 0]
    jaxpage.check_cache(cache)


def test_truncate_does_not_lengthen():
    cache = grown(6, 9, 0, 0)
    before = state(cache)
    unchanged(before, truncate(cache, ints(7, 9, 3, 2**31 - 1)))


def test_a_draft_that_crosses_several_blocks_is_taken_back_whole():
    """A speculative draft of 8 tokens spans four blocks of 2; all that it does not keep come free."""
    cache = grown(3, 0, block_size=2, max_seqs=2, max_blocks_per_seq=8, num_blocks=9)
    cache, ok = reserve(cache, ints(11, 0))
    assert ok.all()
    assert table(cache)[0] == [1, 2, 3, 4, 5, 6]
    cache = truncate(cache, ints(5, 0))
    assert table(cache)[0] == [1, 2, 3]
    assert int(cache.pool.num_free) == 5
    jaxpage.check_cache(cache)


# Attaching


def prefix_in_index():
    """Blocks 1 and 2 live on in an index only; row 1 has block 3."""
    cache = hold(grown(8, 1, 0, 0), ints(1, 2))
    return release(cache, mask(0))


def test_attach_makes_a_row_an_owner_of_held_blocks():
    cache, ok = attach(prefix_in_index(), jnp.int32(2), ints(1, 2, 7), jnp.int32(6))
    assert ok
    assert table(cache) == [[], [3], [1, 2], []]
    assert lengths(cache) == [0, 1, 6, 0]
    jaxpage.check_cache(cache, holds=np.array([1, 2]))


@pytest.mark.parametrize(
    ("seq", "blocks", "length", "fault"),
    [
        (2, (1, 4, 0), 8, "a free block"),
        (2, (1, 0, 0), 5, "the null block"),
        (2, (1, 9, 0), 8, "a block past the pool"),
        (2, (-1, 2, 0), 8, "a negative block"),
        (1, (1, 2, 0), 8, "a row that holds tokens"),
        (2, (1, 2, 0), 13, "more tokens than the blocks hold"),
        (2, (1, 2, 0), -1, "a negative length"),
        (4, (1, 2, 0), 8, "a row past the table"),
        (-1, (1, 2, 0), 8, "a negative row"),
    ],
)
def test_attach_refuses_and_changes_nothing(seq, blocks, length, fault):
    cache = prefix_in_index()
    before = state(cache)
    cache, ok = attach(cache, jnp.int32(seq), ints(*blocks), jnp.int32(length))
    assert not ok, fault
    unchanged(before, cache)


def test_attach_refuses_more_blocks_than_a_row_has():
    cache = hold(grown(16, 4, 0, 0), ints(1, 2, 3, 4, 5))
    before = state(cache)
    cache, ok = attach(cache, jnp.int32(2), ints(1, 2, 3, 4, 5), jnp.int32(17))
    assert not ok
    unchanged(before, cache)


def test_a_held_block_is_never_reused_and_a_dropped_one_is_no_longer_attachable():
    """A prefix remembered past its block's life would read the keys of whoever got the block next."""
    cache, ok = reserve(prefix_in_index(), ints(16, 1, 8, 0))
    assert ok.tolist() == [True, True, False, True]  # five are free, and the two held ones are not
    assert not {1, 2} & {block for row in table(cache) for block in row}
    cache = drop(release(cache, mask(0)), ints(1, 2))
    before = state(cache)
    cache, ok = attach(cache, jnp.int32(3), ints(1, 2, 0), jnp.int32(8))
    assert not ok
    unchanged(before, cache)


def test_a_hit_is_not_eaten_by_its_own_growth():
    """Need four new blocks, five look free, but two of those are the hit's own: refused, and no reference leaks."""
    cache = hold(grown(8, 12, 0, 0), ints(1, 2))
    cache = release(cache, mask(0))  # three are free, and two more would come free with the index's holds
    cache, ok = attach(cache, jnp.int32(2), ints(1, 2, 0), jnp.int32(8))
    assert ok
    cache = drop(cache, ints(1, 2))  # the index gives way; the hit is already held by its row
    cache, ok = reserve(cache, ints(0, 12, 16, 8))
    assert ok.tolist() == [True, True, True, False]
    assert table(cache)[2][:2] == [1, 2]
    jaxpage.check_cache(cache)
    cache = release(cache, mask(1, 2))
    assert int(cache.pool.num_free) == 8
    jaxpage.check_cache(cache)


def test_an_attached_partial_block_is_copied_before_it_is_written():
    cache, _ = attach(filled(prefix_in_index()), jnp.int32(2), ints(1, 2, 0), jnp.int32(6))
    before = stored(cache)
    cache, ok = reserve(cache, ints(0, 1, 7, 0))
    assert ok.all()
    block = table(cache)[2][1]
    assert block not in (1, 2, 3)
    np.testing.assert_array_equal(stored(cache)[:, block], before[:, 2])
    np.testing.assert_array_equal(stored(cache)[:, 2], before[:, 2])
    jaxpage.check_cache(cache, holds=np.array([1, 2]))


# Looking at a cache


def test_usage_counts_a_shared_block_once():
    cache = fork(grown(6, 1, 0, 0), ints(0), ints(2))
    used = jaxpage.usage(cache)
    assert used == (3, 8, 7, 12)
    assert used.share == pytest.approx(7 / 12)
    assert jaxpage.usage(empty()) == (0, 8, 0, 0)
    assert jaxpage.usage(empty()).share == 0.0


def corrupt(pool=None, table=None):
    def change(cache):
        return cache._replace(
            pool=cache.pool._replace(**(pool(cache.pool) if pool else {})),
            table=cache.table._replace(**(table(cache.table) if table else {})),
        )

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (corrupt(pool=lambda pool: {"num_free": jnp.int32(9)}), "num_free is 9 of 9 blocks"),
        (corrupt(pool=lambda pool: {"num_free": jnp.int32(-1)}), "num_free is -1 of 9 blocks"),
        (corrupt(pool=lambda pool: {"free": pool.free.at[0].set(0)}), "the free list names a block outside 1 to 8"),
        (corrupt(pool=lambda pool: {"free": pool.free.at[0].set(9)}), "the free list names a block outside 1 to 8"),
        (corrupt(pool=lambda pool: {"free": pool.free.at[0].set(pool.free[1])}), "a block is free twice"),
        (corrupt(pool=lambda pool: {"refs": pool.refs.at[0].set(1)}), "the null block has 1 references"),
        (corrupt(pool=lambda pool: {"num_free": pool.num_free - 1}), r"3 free \+ 4 used \+ 1 null are not 9 blocks"),
        (corrupt(pool=lambda pool: {"refs": pool.refs.at[8].set(1).at[1].set(0)}), "a free block has references"),
        (corrupt(table=lambda table: {"lengths": table.lengths.at[1].set(17)}), "sequence 1 holds 17 tokens, its row has room for 16"),
        (corrupt(table=lambda table: {"lengths": table.lengths.at[2].set(-1)}), "sequence 2 holds -1 tokens"),
        (corrupt(table=lambda table: {"blocks": table.blocks.at[0, 1].set(0)}), "sequence 0 has a hole in its 2 blocks"),
        (corrupt(table=lambda table: {"blocks": table.blocks.at[0, 1].set(9)}), "sequence 0 has a hole in its 2 blocks"),
        (corrupt(table=lambda table: {"blocks": table.blocks.at[0, 2].set(1)}), "sequence 0 names blocks past its 6 tokens"),
        (corrupt(table=lambda table: {"lengths": table.lengths.at[0].set(4)}), "sequence 0 names blocks past its 4 tokens"),
        (corrupt(table=lambda table: {"blocks": table.blocks.at[0, 1].set(1)}), "sequence 0 names a block twice"),
        (corrupt(pool=lambda pool: {"refs": pool.refs.at[1].set(2)}), "block 1 has 2 references but is named 1 times"),
        (corrupt(table=lambda table: {"blocks": table.blocks.at[1, 0].set(2)}), "block 2 has 1 references but is named 2 times"),
    ],
)
def test_check_cache_says_what_is_broken(change, message):
    cache = grown(6, 7, 0, 0)
    jaxpage.check_cache(cache)
    with pytest.raises(ValueError, match=f"broken cache: {message}"):
        jaxpage.check_cache(change(cache))


def test_check_cache_counts_the_holds_of_an_index():
    cache = hold(grown(6, 0, 0, 0), ints(2))
    jaxpage.check_cache(cache, holds=np.array([2]))
    with pytest.raises(ValueError, match="block 2 has 2 references but is named 1 times"):
        jaxpage.check_cache(cache)
    with pytest.raises(ValueError, match="block 2 has 2 references but is named 3 times"):
        jaxpage.check_cache(cache, holds=np.array([2, 2]))


# Sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"block_size": -1}, "block_size must be a positive integer, got -1"),
        ({"max_seqs": 2.0}, r"max_seqs must be a positive integer, got 2\.0"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, int8, float8_e4m3fn, got 'float64'"),
        ({"num_blocks": 2**27, "block_size": 16}, r"num_blocks \* block_size \* num_kv_heads is 2147483648, beyond what int32 can number"),
        ({"num_blocks": 2**20, "num_kv_heads": 2**6, "block_size": 32}, "use fewer or smaller blocks"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        jaxpage.CacheConfig(**(SIZES | sizes))


def test_the_largest_pool_that_int32_can_number_is_allowed():
    jaxpage.CacheConfig(**(SIZES | {"num_blocks": 2**31 - 1, "block_size": 1}))


def test_sizes_in_bytes():
    config = jaxpage.CacheConfig(**(SIZES | {"dtype": "bfloat16"}))
    assert config.bytes_per_token == 2 * 2 * 1 * 2 * 2
    assert config.pool_bytes == 9 * 4 * config.bytes_per_token
    cache = jaxpage.init_cache(config, "xla")
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache.storage)) == config.pool_bytes
    assert cache.block_size == 4


def test_a_backend_without_a_layout_is_refused():
    with pytest.raises(NotImplementedError, match="no storage layout for backend 'abacus'; there is one for: xla"):
        jaxpage.init_cache(jaxpage.CacheConfig(**SIZES), "abacus")


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31_elements_reach_the_last_block():
    """An element offset kept in 32 bits wraps around here, and lands in another block or before the array."""
    num_blocks, block_size, num_kv_heads, head_dim = 65536 + 2, 32, 16, 64
    assert num_blocks * block_size * num_kv_heads * head_dim > 2**31
    dtype = jnp.float8_e4m3fn  # one byte, so that the pool fits a small machine
    rows = jnp.array([[num_blocks - 1], [1], [num_blocks // 2]], jnp.int32)
    one = jnp.arange(3.0)[:, None, None] + 1 + jnp.arange(num_kv_heads, dtype=jnp.float32)[None, :, None] / 4
    value = jnp.broadcast_to(one, (3, num_kv_heads, head_dim)).astype(dtype)
    last = jnp.full(3, block_size, jnp.int32)

    @jax.jit
    def write_and_attend(value):
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        storage = xla.write(layout.XlaStorage(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)), value, value, rows, last, None)
        query = jnp.zeros((3, num_kv_heads, head_dim), jnp.float32)
        out = xla.attend(query, storage, rows, last, None, scale=1.0, window=1, soft_cap=None, sinks=None)
        return out, storage.keys[-1], storage.values[-2]

    out, keys, values = write_and_attend(value)
    np.testing.assert_array_equal(out, value.astype(jnp.float32))
    expected = jnp.zeros((num_kv_heads, block_size, head_dim)).at[:, -1].set(value[0].astype(jnp.float32))
    np.testing.assert_array_equal(keys.astype(jnp.float32), expected)
    assert not values.astype(jnp.float32).any()


# With attention and a decoder on top


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_what_the_null_block_holds_reaches_no_result(implementation):
    """Block 0 takes all masked writes; whatever is there must not leak through short rows, empty rows or padding."""
    cache = grown(6, 0, 1, 0)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 4, 1, 2))
    now = jnp.array([6, 0, 1, 0], jnp.int32)

    @jax.jit
    def run(null):
        storage = jax.tree.map(lambda side: side.at[0].set(null), filled(cache).storage[0])
        return jaxpage.paged_attention(q, k, v, storage, cache.table.blocks, now, scale=1.0, implementation=implementation)

    out, storage = run(jnp.nan)
    expected, plain = run(0.0)
    np.testing.assert_array_equal(out, expected)
    assert np.isfinite(np.asarray(out)).all()
    assert not np.asarray(out)[[1, 3]].any()
    np.testing.assert_array_equal(storage.keys[1:], plain.keys[1:])


def test_four_rows_forked_from_one_partial_tail_each_write_their_own_text(tiny):
    """Without copy-on-write the four would overwrite each other's newest token in the block they share."""
    model = jax.tree.map(lambda weight: weight * 8 if weight.ndim == 2 else weight, tiny)  # so that the context matters
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "num_blocks": 17}
    prompt, firsts = ints(5, 17, 3, 44, 8, 61), ints(7, 30, 52, 90)
    sampler = Sampler(jnp.full((4, 0), -1, jnp.int32), ints(0, 0, 0, 0), ints(9, 9, 9, 9), jnp.zeros(4, bool), None, None, None, None)
    prefill = jax.jit(jaxpage.prefill)
    decode = jax.jit(lambda cache: jaxpage.decode_loop(model, jaxpage.init_state(cache, sampler, firsts, jnp.ones(4, bool)), 9))

    cache, _ = reserve(empty(**sizes), ints(6, 0, 0, 0))
    tokens = jnp.zeros(24, jnp.int32).at[:6].set(prompt)
    cache, _ = prefill(model, cache, tokens, ints(6, 0, 0, 0), ints(0, 6, 6, 6, 6))
    state, forked, starved = decode(fork(cache, ints(0, 0, 0), ints(1, 2, 3)))
    assert not starved.any()
    jaxpage.check_cache(state.cache)

    cache, _ = reserve(empty(**sizes), ints(6, 6, 6, 6))
    cache, _ = prefill(model, cache, jnp.tile(prompt, 4), ints(6, 6, 6, 6), ints(0, 6, 12, 18, 24))
    _, independent, _ = decode(cache)
    assert forked.tokens.tolist() == independent.tokens.tolist()
    assert len({tuple(row) for row in forked.tokens.tolist()}) == 4
