"""A restored prefix index against the one that was saved: from there on both do the same."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.prefix import POLICIES, HashIndex, RadixIndex, check_index
from jaxpage.prefix.saved import index_state, load_state

KINDS = {"radix": RadixIndex, "hash": HashIndex}
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few and few of each, so that prefixes meet often
NAMESPACES = st.sampled_from(["", "a"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TOKENS, NAMESPACES, st.integers(0, 2)),
        st.tuples(st.just("lock"), TOKENS, NAMESPACES, st.booleans()),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("pin"), TOKENS, NAMESPACES),
        st.tuples(st.just("evict"), st.integers(0, 3)),
        st.tuples(st.just("forget")),
    ),
    max_size=25,
)


class Life:
    """An index and the locks that are held in it."""

    def __init__(self, index):
        self.index, self.locks, self.next_block = index, [], 1

    def act(self, name, *args):
        """Does one thing; returns all that can be seen of it."""
        return getattr(self, name)(*args), sorted(self.index.blocks), self.index.evictable, self.index.stats

    def insert(self, tokens, namespace, priority):
        count = -(-len(tokens) // self.index.block_size)
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        return self.index.insert(tokens, blocks, namespace, priority)

    def lock(self, tokens, namespace, counted):
        match = self.index.match([*tokens, 0], namespace)
        self.index.lock(match, counted)
        self.locks.append(match)
        return match

    def unlock(self, place):
        if self.locks:
            self.index.unlock(self.locks.pop(place % len(self.locks)))

    def pin(self, tokens, namespace):
        try:
            return self.index.pin(tokens, namespace)
        except KeyError as error:
            return str(error)

    def evict(self, count):
        return self.index.evict(count)

    def forget(self):
        return self.index.forget()


def saved_and_restored(life, kind, policy):
    """The same life on an index that has been through JSON."""
    other = Life(kind(life.index.block_size, policy))
    load_state(other.index, json.loads(json.dumps(index_state(life.index))))
    other.locks, other.next_block = life.locks.copy(), life.next_block
    check_index(other.index)
    return other


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 3), ACTIONS, ACTIONS)
def test_a_restored_index_does_what_the_saved_one_does(kind, policy, block_size, before, after):
    life = Life(KINDS[kind](block_size, policy))
    for action in before:
        life.act(*action)
    other = saved_and_restored(life, KINDS[kind], policy)
    assert index_state(other.index) == index_state(life.index)
    for action in after:
        assert other.act(*action) == life.act(*action)
    while life.locks:
        assert other.act("unlock", 0) == life.act("unlock", 0)
    assert other.index.evict(1000) == life.index.evict(1000)  # in the same order
    check_index(other.index)


def test_equal_keys_are_evicted_in_the_order_of_the_saved_index():
    """A policy that prefers nobody leaves the order to the queue."""
    index = RadixIndex(1, lambda record: 0)
    for token in (5, 3, 9, 1):
        index.insert([token], [token])
    index.lock(index.match([5, 0]))
    index.unlock(index.match([5, 0]))  # its turn comes last now
    other = RadixIndex(1, lambda record: 0)
    load_state(other, index_state(index))
    assert other.evict(4) == index.evict(4) == [3, 9, 1, 5]


def test_what_cannot_be_restored_is_refused():
    index = RadixIndex(2)
    index.insert([1, 2], [7])
    state = index_state(index)
    with pytest.raises(ValueError, match="only an empty index can take a saved state, this one holds 1 blocks"):
        load_state(index, state)
    with pytest.raises(ValueError, match="the saved index is 'radix' with blocks of 2 tokens, this one is 'hash' with 2"):
        load_state(HashIndex(2), state)
    with pytest.raises(ValueError, match="the saved index is 'radix' with blocks of 2 tokens, this one is 'radix' with 4"):
        load_state(RadixIndex(4), state)

    class Own(RadixIndex):
        pass

    with pytest.raises(ValueError, match="an index of class Own cannot be saved or restored; those of radix, hash can"):
        index_state(Own(2))
