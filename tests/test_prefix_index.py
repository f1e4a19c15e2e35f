"""Prefix indexes on the host: one suite over both kinds and all eviction policies, and what is special to each."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpage
from jaxpage import block_pool
from jaxpage.prefix import POLICIES, HashIndex, PrefixIndex, RadixIndex, Removed, Stats, Stored, check_index

KINDS = {"hash": HashIndex, "radix": RadixIndex}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=POLICIES)
def index(request, kind):
    """An index of blocks of 4, checked at the end of each test."""
    index = kind(4, policy=request.param)
    yield index
    check_index(index)


def prompt(*blocks):
    """Tokens of whole blocks of 4, each told by one number."""
    return [token for block in blocks for token in (block, 0, 0, block)]


def find(index, tokens, namespace=""):
    """The blocks and the length of a match that may cover all of the tokens."""
    match = index.match([*tokens, 999], namespace)
    return list(match.blocks), match.length


def test_has_all_operations_of_the_protocol(kind):
    for name, member in vars(PrefixIndex).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert inspect.signature(getattr(kind, name)) == inspect.signature(member), name


def test_finds_what_was_inserted_and_only_that(index):
    assert index.insert(prompt(1, 2, 3), [5, 6, 7]) == [5, 6, 7]
    assert find(index, prompt(1, 2, 3)) == ([5, 6, 7], 12)
    assert find(index, prompt(1, 2, 9)) == ([5, 6], 8)
    assert find(index, prompt(9, 2, 3)) == ([], 0)
    assert find(index, prompt(1, 2, 3, 4)) == ([5, 6, 7], 12)
    assert (index.total, index.evictable, index.protected) == (3, 3, 0)
    assert sorted(index.blocks) == [5, 6, 7]


def test_the_last_token_is_always_computed(index):
    index.insert(prompt(1, 2), [5, 6])
    match = index.match(prompt(1, 2))
    assert match.length == {HashIndex: 4, RadixIndex: 7}[type(index)]
    assert match.tail == {HashIndex: 4, RadixIndex: 3}[type(index)]
    assert index.match(prompt(1)[:1]).length == 0


@pytest.mark.parametrize("tokens", [[], np.zeros(0, np.int32)])
def test_an_empty_prompt_is_a_miss(index, tokens):
    index.insert(prompt(1), [5])
    match = index.match(tokens)
    assert (match.blocks, match.length, match.tail) == ((), 0, 0)
    index.lock(match)
    index.unlock(match)
    assert index.insert(tokens, []) == []


def test_tokens_may_come_in_any_integer_type(index):
    index.insert(np.asarray(prompt(1, 2), np.uint16), np.asarray([5, 6], np.int32))
    assert find(index, np.asarray(prompt(1, 2), np.int64)) == ([5, 6], 8)
    assert find(index, tuple(prompt(1, 2))) == ([5, 6], 8)
    assert all(type(block) is int for block in index.evict(2))


def test_first_come_stays(index):
    index.insert(prompt(1, 2), [5, 6])
    assert index.insert(prompt(1, 2, 3), [7, 8, 9]) == [9]
    assert find(index, prompt(1, 2, 3)) == ([5, 6, 9], 12)
    assert index.insert(prompt(1, 2, 3), [5, 6, 9]) == []


def test_a_block_reused_for_other_tokens_is_not_found_for_the_old_ones(index):
    index.insert(prompt(1), [5])
    assert index.evict(1) == [5]
    index.insert(prompt(2), [5])
    assert find(index, prompt(1)) == ([], 0)
    assert find(index, prompt(2)) == ([5], 4)


def test_a_block_cannot_be_held_for_two_prefixes(index):
    index.insert(prompt(1, 2), [5, 6])
    for tokens, blocks in [(prompt(3), [6]), (prompt(1, 3), [5, 6]), (prompt(1, 2, 3), [5, 8, 6]), (prompt(2), [6])]:
        with pytest.raises(ValueError, match="block 6 is held for other tokens, as block 1 of a sequence in namespace ''"):
            index.insert(tokens, blocks)
    assert sorted(index.blocks) == [5, 6]
    assert find(index, prompt(1, 2)) == ([5, 6], 8)


def test_ends_of_sequences_are_evicted_first(index):
    """So a match never skips a block that is gone: after block 1 of a chain there is nothing left of it."""
    index.insert(prompt(1, 2, 3), [5, 6, 7])
    for left in (2, 1, 0):
        assert index.evict(1) == [5 + left]
        assert find(index, prompt(1, 2, 3)) == ([5, 6, 7][:left], 4 * left)
    assert index.evict(1) == []


def test_evicts_no_more_than_it_is_asked_for(index):
    index.insert(prompt(1, 2, 3, 4, 5), [5, 6, 7, 8, 9])
    assert index.evict(0) == []
    assert index.evict(2) == [9, 8]
    assert find(index, prompt(1, 2, 3, 4, 5)) == ([5, 6, 7], 12)
    assert sorted(index.evict(100)) == [5, 6, 7]


def test_locked_blocks_are_not_evicted(index):
    index.insert(prompt(1, 2, 3), [5, 6, 7])
    match = index.match(prompt(1, 2, 9))
    index.lock(match)
    assert (index.evictable, index.protected) == (1, 2)
    assert index.evict(3) == [7]
    index.lock(match)
    index.unlock(match)
    assert index.evict(3) == []
    index.unlock(match)
    assert index.evict(3) == [6, 5]


def test_a_hit_is_held_before_others_are_evicted_for_it(index):
    """Four more blocks are needed and five look evictable, but two of those are the hit's own: refuse, and leave no trace."""
    index.insert(prompt(1, 2, 3, 4), [5, 6, 7, 8])
    index.insert(prompt(9), [4])
    match = index.match(prompt(1, 2, 7, 7, 7, 7))
    assert (index.evictable, match.blocks) == (5, (5, 6))
    index.lock(match)
    assert index.evictable == 3  # so the caller knows that four cannot be had, and evicts nothing
    assert set(index.evict(4)) == {4, 7, 8}  # and if it does, the hit is still there
    index.unlock(match, used=False)
    assert (index.evictable, index.protected) == (2, 0)
    assert find(index, prompt(1, 2)) == ([5, 6], 8)
    assert (index.stats[""].queried_tokens, index.stats[""].hit_tokens) == (0, 0)


def test_a_match_that_was_evicted_is_stale(index):
    index.insert(prompt(1, 2), [5, 6])
    match = index.match(prompt(1, 2, 3))
    index.evict(1)
    with pytest.raises(ValueError, match="stale: block 6 was let go since; match again"):
        index.lock(match)
    index.insert(prompt(1, 9), [5, 6])  # the same block at the same place, for other tokens
    with pytest.raises(ValueError, match="stale"):
        index.lock(match)
    assert index.protected == 0


def test_unlocking_what_is_not_locked_is_an_error(index):
    index.insert(prompt(1, 2), [5, 6])
    match = index.match(prompt(1, 2, 3))
    with pytest.raises(ValueError, match="match of 8 tokens in 2 blocks is not locked"):
        index.unlock(match)
    index.lock(match)
    index.unlock(match)
    with pytest.raises(ValueError, match="not locked"):
        index.unlock(match)


def test_matching_changes_nothing(index):
    index.insert(prompt(1, 2, 3), [5, 6, 7])
    index.insert(prompt(8), [9])
    for _ in range(3):
        index.match(prompt(1, 2, 3, 4))
    assert index.stats == {}
    assert len(index.nodes()) == {HashIndex: 4, RadixIndex: 2}[type(index)]


def test_chunks_are_inserted_at_absolute_positions(kind):
    """200 tokens in blocks of 16, the second chunk from token 100 on."""
    tokens = np.random.default_rng(0).integers(0, 50000, 200)
    blocks = list(range(1, 14))
    chunked, whole = kind(16), kind(16)
    held = chunked.insert(tokens[:100], blocks[:7])
    held += chunked.insert(tokens, blocks)
    assert held == whole.insert(tokens, blocks)
    assert find(chunked, tokens) == find(whole, tokens) == {HashIndex: (blocks[:12], 192), RadixIndex: (blocks, 200)}[kind]
    assert find(chunked, tokens[96:]) == ([], 0)
    check_index(chunked)


@pytest.mark.parametrize("base", [31, 33, 257, 65599, 1000003])
@pytest.mark.parametrize("change", [(1, -1), (-1, 1)])
@pytest.mark.parametrize("lower_first", [False, True])
def test_prefixes_that_a_weak_hash_takes_for_equal(index, base, change, lower_first):
    """One more here and `base` less beside it cancel out in a hash that multiplies by the base, in whatever order it goes."""
    up, down = change
    steps = (up * base, down) if lower_first else (up, down * base)
    other = [7, 2000000 + steps[0], 2000000 + steps[1], 7]
    index.insert([7, 2000000, 2000000, 7], [5])
    assert find(index, other)[1] == {HashIndex: 0, RadixIndex: 1}[type(index)]
    index.insert(other, [6])
    assert find(index, other) == ([6], 4)


def test_namespaces_are_apart(index):
    index.insert(prompt(1), [5], "a")
    index.insert(prompt(1), [6], "b")
    assert find(index, prompt(1), "a") == ([5], 4)
    assert find(index, prompt(1), "b") == ([6], 4)
    for other in ("", "ab", "A", "a\0"):
        assert find(index, prompt(1), other) == ([], 0)


def test_a_block_longer_than_the_prompt(kind):
    index = kind(64)
    assert index.match(range(10)).length == 0
    assert index.insert(range(10), [5]) == {HashIndex: [], RadixIndex: [5]}[kind]
    assert index.match(range(10)).length == {HashIndex: 0, RadixIndex: 9}[kind]
    assert index.evict(1) == {HashIndex: [], RadixIndex: [5]}[kind]
    check_index(index)


def test_forgets_all_when_the_weights_change(index):
    index.insert(prompt(1, 2), [5, 6])
    index.insert(prompt(3), [7], "a")
    match = index.match(prompt(1, 2, 9))
    index.lock(match)
    index.pin(prompt(3), "a")
    assert sorted(index.forget()) == [5, 6, 7]
    assert (index.total, index.evictable, index.protected, index.blocks) == (0, 0, 0, [])
    assert find(index, prompt(1, 2)) == ([], 0)
    with pytest.raises(ValueError, match="stale"):
        index.lock(match)
    index.insert(prompt(1, 2), [5, 6])  # under the new weights
    index.unlock(match)  # void, and no business of the new ones
    assert (index.evictable, index.protected) == (2, 0)
    with pytest.raises(KeyError, match="not pinned"):
        index.unpin(prompt(3), "a")
    assert index.forget() and index.forget() == []


def test_pinned_prefixes_stay(index):
    index.insert(prompt(1, 2, 3), [5, 6, 7])
    assert index.pin(prompt(1, 2)) == 8
    assert index.evict(3) == [7]
    index.insert(prompt(1, 2, 3), [5, 6, 7])
    assert index.pin(prompt(1, 2, 3, 4)) == 12
    index.unpin(prompt(1, 2))
    assert index.evict(3) == []
    index.unpin(prompt(1, 2, 3, 4))
    assert index.evict(3) == [7, 6, 5]


def test_to_pin_again_is_to_pin_what_there_is_now(index):
    index.insert(prompt(1), [5])
    assert index.pin(prompt(1, 2)) == 4
    index.insert(prompt(1, 2), [5, 6])
    assert index.pin(prompt(1, 2)) == 8
    index.unpin(prompt(1, 2))
    assert index.evict(9) == [6, 5]


def test_pins_that_are_not_there(index):
    with pytest.raises(KeyError, match="none of the 4 tokens is held in namespace 'a'"):
        index.pin(prompt(1), "a")
    with pytest.raises(KeyError, match="the 4 tokens are not pinned in namespace 'a'"):
        index.unpin(prompt(1), "a")


def test_counts_by_namespace(index):
    index.insert(prompt(1, 2), [5, 6], "a")
    for tokens in (prompt(1, 2, 3), prompt(1, 9, 9)):
        index.lock(index.match(tokens, "a"))
    index.lock(index.match(prompt(1), "b"))
    index.insert(prompt(7), [7], "b")
    index.evict(1)
    assert index.stats == {"a": Stats(24, 12, 0), "b": Stats(4, 0, 1)}


def test_tells_what_it_holds_and_lets_go(kind):
    """A router that knows only the events has the same blocks, and the tokens before each."""
    events, known = [], {}
    index = kind(4, on_event=events.append)
    index.insert(prompt(1, 2), [5, 6], "a")
    index.insert(prompt(1, 2, 3), [7, 8, 9], "a")
    index.insert(prompt(1, 2, 3), [7, 8, 9], "a")
    index.insert(prompt(4), [4])
    index.evict(1)
    index.forget()
    assert events[:3] == [
        Stored("a", 0, (5, 6), tuple(prompt(1, 2))),
        Stored("a", 6, (9,), tuple(prompt(3))),
        Stored("", 0, (4,), tuple(prompt(4))),
    ]
    assert len(events) == 5
    for event in events[:3]:
        for place, block in enumerate(event.blocks):
            parent = event.blocks[place - 1] if place else event.parent
            known[block] = known.get(parent, ()) + event.tokens[4 * place : 4 * place + 4]
    assert known == {5: tuple(prompt(1)), 6: tuple(prompt(1, 2)), 9: tuple(prompt(1, 2, 3)), 4: tuple(prompt(4))}
    gone = [block for event in events[3:] if isinstance(event, Removed) for block in event.blocks]
    assert sorted(gone) == sorted(known)


@pytest.mark.parametrize(
    ("tokens", "blocks", "message"),
    [
        (prompt(1), [5, 6], "4 tokens are 1 blocks of 4, got 2 blocks"),
        (prompt(1, 2), [5], "8 tokens are 2 blocks of 4, got 1 blocks"),
        (prompt(1, 2), [5, 5], "blocks must differ"),
        (prompt(1, 2), [5, 0], "above the null block 0"),
        (prompt(1, 2), [-5, 1], "above the null block 0"),
        ([1, 2, -3, 4], [5], "token ids must be from 0 to 2147483647, got -3"),
        ([1, 2, 2**31, 4], [5], "got 2147483648"),
        ([1.0, 2.0], [5], "one row of integers, got float64"),
        ([[1, 2]], [5], r"of shape \(1, 2\)"),
        ("ab", [5], "one row of integers"),
        ([True, False], [5], "one row of integers, got bool"),
    ],
)
def test_refuses_by_name(index, tokens, blocks, message):
    with pytest.raises(ValueError, match=message):
        index.insert(tokens, blocks)
    assert index.total == 0


def test_refuses_wrong_settings(kind):
    for size in (0, -1, 2.0):
        with pytest.raises(ValueError, match="block_size must be a positive integer"):
            kind(size)
    with pytest.raises(ValueError, match="must be one of lru, lfu, fifo, priority, or a function of a Record; got 'mru'"):
        kind(4, policy="mru")
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        kind(4).evict(-1)


def use(index, tokens):
    match = index.match([*tokens, 999])
    index.lock(match)
    index.unlock(match)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [7, 6, 8, 5]),
        ("lfu", [8, 7, 6, 5]),
        ("fifo", [5, 6, 7, 8]),
        ("priority", [7, 8, 5, 6]),
        (lambda record: -record.used, [5, 8, 6, 7]),  # the one used last, first
    ],
)
def test_policies(kind, policy, order):
    index = kind(4, policy=policy)
    for number, block in enumerate((5, 6, 7)):
        index.insert(prompt(number), [block], priority=number == 1)
    for number in (0, 0, 0, 2, 1, 1):
        use(index, prompt(number))
    index.insert(prompt(3), [8])
    use(index, prompt(0))
    assert [index.evict(1)[0] for _ in order] == order
    check_index(index)


def test_inserting_again_is_a_use_for_lru(kind):
    index = kind(4)
    index.insert(prompt(1), [5])
    index.insert(prompt(2), [6])
    index.insert(prompt(1), [7])
    assert index.evict(2) == [6, 5]


def test_what_is_shared_has_the_highest_priority_of_its_owners(kind):
    index = kind(4, policy="priority")
    index.insert(prompt(1, 2), [5, 6])
    index.insert(prompt(1, 3), [5, 7], priority=2)
    index.insert(prompt(4), [8], priority=1)
    assert index.evict(4) == [6, 8, 7, 5]


def test_eviction_does_not_look_at_the_whole_tree(kind):
    """What is looked at is counted by the keys that are made: a few for each use and each block let go."""
    keys = 0

    def policy(record):
        nonlocal keys
        keys += 1
        return record.used

    index = kind(1, policy=policy)
    for start in range(2000):
        index.insert([start, 1], [2 * start + 1, 2 * start + 2])
    keys = 0
    for start in range(2000):
        use(index, [start])
        assert len(index.evict(2)) == 2
    assert index.total == 0
    assert keys < 4 * 2000 * 2


def test_the_queue_of_candidates_does_not_grow_with_uses(kind):
    index = kind(4)
    index.insert(prompt(1), [5])
    for _ in range(2000):
        use(index, prompt(1))
        index.insert(prompt(1), [5])
    assert len(index._queue._heap) < 100


def test_hash_keys_are_of_the_index():
    one, other = HashIndex(4), HashIndex(4)
    for index in (one, other):
        index.insert(prompt(1), [5])
    assert not set(one._nodes) & set(other._nodes)
    same = HashIndex(4, secret=b"k" * 32), HashIndex(4, secret=b"k" * 32)
    for index in same:
        index.insert(prompt(1), [5])
    assert set(same[0]._nodes) == set(same[1]._nodes)
    assert all(len(key) == 16 for key in one._nodes)
    with pytest.raises(ValueError, match="secret must have 16 to 64 bytes, got 3"):
        HashIndex(4, secret=b"abc")


def test_hash_keys_are_of_all_tokens_before():
    index = HashIndex(4)
    index.insert(prompt(1, 2), [5, 6])
    index.insert(prompt(3, 2), [7, 8])
    assert len(index._nodes) == 4
    assert find(index, prompt(3, 2)) == ([7, 8], 8)


def test_hash_takes_full_blocks_only():
    index = HashIndex(4)
    assert index.insert([1, 2, 3, 4, 5, 6], [5, 6]) == [5]
    assert find(index, [1, 2, 3, 4, 5, 6]) == ([5], 4)
    assert find(index, [1, 2, 3]) == ([], 0)


@pytest.fixture
def radix():
    index = RadixIndex(4)
    yield index
    check_index(index)


def test_radix_matches_to_the_token(radix):
    radix.insert(range(1, 11), [5, 6, 7])
    for length in range(1, 11):
        match = radix.match([*range(1, length + 1), 99])
        assert (match.length, len(match.blocks), match.tail) == (length, -(-length // 4), (length - 1) % 4 + 1)


def test_radix_splits_and_counts_each_block_once(radix):
    def state():
        check_index(radix)
        return len(radix.nodes()), radix.total, radix.evictable, radix.protected

    radix.insert(prompt(1, 2, 3, 4), [5, 6, 7, 8])
    match = radix.match(prompt(1, 2, 3, 9))
    assert match.length == 12
    radix.lock(match)
    assert state() == (2, 4, 1, 3)
    radix.insert(prompt(1, 9), [1, 9])  # splits what is locked
    assert state() == (3 + 1, 5, 2, 3)
    radix.insert([1, 7, 7, 7], [4])  # parts within the first block: a sibling
    assert state() == (5, 6, 3, 3)
    radix.unlock(match)
    assert state() == (5, 6, 6, 0)
    assert sorted(radix.evict(9)) == [4, 5, 6, 7, 8, 9]
    assert state() == (0, 0, 0, 0)


def test_radix_holds_siblings_that_part_within_a_block(radix):
    radix.insert([1, 2, 3, 4], [5])
    assert radix.insert([1, 2, 3, 9], [6]) == [6]
    assert radix.insert([1, 8, 8, 8], [7]) == [7]
    for tokens, block, length in [
        ([1, 2, 3, 4], 5, 4),
        ([1, 2, 3, 9], 6, 4),
        ([1, 8, 0], 7, 2),
        ([1, 8, 8, 8], 7, 4),
        ([1, 2, 3, 10], 6, 3),
        ([1, 2, 3, 0], 5, 3),
    ]:
        assert find(radix, tokens) == ([block], length)
    assert find(radix, [1, 5])[1] == 1
    assert find(radix, [2, 2]) == ([], 0)


def test_radix_keeps_a_partial_tail_until_its_clone_has_replaced_it(radix):
    assert radix.insert([1, 2, 3, 4, 5, 6], [5, 6]) == [5, 6]
    match = radix.match([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (match.blocks, match.length, match.tail) == ((5, 6), 6, 2)
    radix.lock(match)
    # The sequence writes to a clone of block 6, and is inserted with that.
    assert radix.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 7, 8]) == [7, 8]
    radix.unlock(match)
    assert find(radix, [1, 2, 3, 4, 5, 6, 7]) == ([5, 7], 7)
    assert radix.evict(1) == [6]  # nothing is lost: its tokens are in the clone
    assert find(radix, [1, 2, 3, 4, 5, 6, 7]) == ([5, 7], 7)


def test_radix_does_not_take_a_tail_that_it_has_more_of(radix):
    radix.insert([1, 2, 3, 4, 5, 6, 7, 8], [5, 6])
    assert radix.insert([1, 2, 3, 4, 5, 6], [7, 8]) == []
    assert radix.insert([1, 2, 3, 4, 5, 9], [7, 8]) == [8]


def test_radix_takes_a_block_that_was_written_on(radix):
    """A chunked prefill whose room was reserved at once writes on in the block that was inserted."""
    events = []
    radix._on_event = events.append
    radix.insert([1, 2, 3], [5])
    assert radix.insert([1, 2, 3, 9], [6]) == [6]
    assert radix.insert([1, 2, 3, 4, 5], [5, 7]) == [7]
    assert find(radix, [1, 2, 3, 4, 5]) == ([5, 7], 5)
    assert radix.insert([1, 2, 3, 4, 5, 6], [5, 7]) == []
    assert radix.insert([1, 2, 3], [5]) == []
    assert find(radix, [1, 2, 3, 4, 5, 6]) == ([5, 7], 6)
    assert find(radix, [1, 2, 3, 9]) == ([6], 4)
    assert events[2:] == [Stored("", 0, (5, 7), (1, 2, 3, 4, 5)), Stored("", 5, (7,), (5, 6))]
    with pytest.raises(ValueError, match="block 7 is held for other tokens"):
        radix.insert([1, 2, 3, 4, 9, 9], [5, 7])


@pytest.mark.parametrize(
    ("tokens", "blocks", "namespace"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [5, 6], "a"),  # in another namespace
        ([9, 2, 3, 4, 5, 6, 7], [7, 6], ""),  # after other tokens
        ([5, 6, 7], [6], ""),  # at another place
        ([1, 2, 3, 4, 9, 6, 7], [5, 6], ""),  # other tokens at the same place
        ([8, 8, 8], [9], "a"),  # a first block in another namespace
        ([7, 7, 7, 7, 5, 6, 7], [2, 1], ""),  # the block before it
    ],
)
def test_radix_takes_a_block_that_was_written_on_at_its_place_only(radix, tokens, blocks, namespace):
    radix.insert([1, 2, 3, 4, 5, 6], [5, 6])
    radix.insert([1, 2, 3, 4, 0], [5, 8])  # the partial block is a node of its own
    radix.insert([8, 8], [9])
    radix.insert([7, 7, 7, 7, 5, 6], [1, 2])
    for space in ("", "a"):
        radix.insert([9, 2, 3, 4], [{"": 3, "a": 4}[space]], space)
    with pytest.raises(ValueError, match="is held for other tokens"):
        radix.insert(tokens, blocks, namespace)
    assert find(radix, [1, 2, 3, 4, 5, 6, 7]) == ([5, 6], 6)


def test_radix_does_not_unlock_a_part_of_what_is_locked(radix):
    radix.insert(prompt(1, 2, 3), [5, 6, 7])
    part = radix.match(prompt(1, 9))
    radix.lock(radix.match(prompt(1, 2, 3, 4)))
    with pytest.raises(ValueError, match="not locked"):
        radix.unlock(part)
    assert radix.protected == 3


def test_radix_keeps_nothing_of_what_was_let_go(radix):
    for number in range(20):
        radix.insert(prompt(1, number, number), [3 * number + 1, 3 * number + 2, 3 * number + 3], str(number % 3))
    radix.evict(100)
    assert not radix._children


def test_radix_nodes_let_go_their_last_blocks_alone(radix):
    radix.insert(prompt(1, 2, 3, 4), [5, 6, 7, 8])
    assert radix.evict(1) == [8]
    assert radix.insert(prompt(1, 2, 3, 4), [5, 6, 7, 9]) == [9]
    assert find(radix, prompt(1, 2, 3, 4)) == ([5, 6, 7, 9], 16)


def ints(values):
    return jnp.asarray(np.asarray(values, np.int32))


def test_an_index_and_a_cache_together(kind):
    """What the index says is what the cache's references are: hit, clone of the tail, eviction, and nothing left at the end."""
    config = jaxpage.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=8, block_size=4, max_seqs=2, max_blocks_per_seq=4)
    cache, index = jaxpage.init_cache(config, "xla"), kind(4)

    def moved(cache, change, blocks):
        cache = cache._replace(pool=change(cache.pool, ints(blocks)))
        jaxpage.check_cache(cache, holds=np.asarray(index.blocks, np.int32))
        return cache

    def row(cache, seq):
        return [block for block in cache.table.blocks[seq].tolist() if block]

    first = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    cache, ok = jaxpage.reserve(cache, ints([10, 0]))
    assert ok.all()
    cache = moved(cache, block_pool.hold, index.insert(first, row(cache, 0)))
    cache = jaxpage.release(cache, jnp.asarray([True, False]))
    jaxpage.check_cache(cache, holds=np.asarray(index.blocks, np.int32))

    second = [*first[:9], 11, 12, 13, 14]
    match = index.match(second)
    assert match.length == {HashIndex: 8, RadixIndex: 9}[kind]
    index.lock(match)
    cache, ok = jaxpage.attach(cache, jnp.int32(1), ints(match.blocks), jnp.int32(match.length))
    assert ok
    cache, ok = jaxpage.reserve(cache, ints([0, 13]))
    assert ok.all()
    assert row(cache, 1)[: match.length // 4] == list(match.blocks[: match.length // 4])
    assert row(cache, 1)[2] not in match.blocks  # a partial tail was cloned
    assert index.protected == len(match.blocks)
    cache = moved(cache, block_pool.hold, index.insert(second, row(cache, 1)))
    cache = jaxpage.release(cache, jnp.asarray([False, True]))
    index.unlock(match)
    assert int(cache.pool.num_free) == 7 - index.total

    while gone := index.evict(2):
        cache = moved(cache, block_pool.drop, gone)
    assert int(cache.pool.num_free) == 7
    cache, ok = jaxpage.attach(cache, jnp.int32(0), ints(match.blocks), jnp.int32(match.length))
    assert not ok  # the device refuses a stale hit
