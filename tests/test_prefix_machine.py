"""Random programs on a prefix index against a plain dict of all blocks that are held and of the tokens up to their ends."""

import dataclasses

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jaxpage.prefix import POLICIES, HashIndex, RadixIndex, Record, check_index

# Few tokens and few of each, so that prefixes meet often.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
NAMESPACES = st.sampled_from(["", "a"])


@dataclasses.dataclass
class Held:
    """A block that the index holds."""

    namespace: str
    prefix: tuple  # all tokens up to its last
    record: Record


class Model:
    """What the index must do, block by block."""

    def __init__(self, block_size, partial, policy):
        self.block_size, self.partial, self.policy = block_size, partial, POLICIES[policy]
        self.held = {}  # block: Held
        self.clock = 0

    def ends(self, length):
        """Where the blocks of so many tokens end."""
        ends = [*range(self.block_size, length + 1, self.block_size)]
        return ends if length % self.block_size == 0 or not self.partial else [*ends, length]

    def place(self, held):
        return (len(held.prefix) - 1) // self.block_size

    def above(self, held):
        """The tokens before a block."""
        return held.prefix[: self.place(held) * self.block_size]

    def holders(self, namespace, tokens):
        """The blocks that hold the last block of these tokens: exactly, or in a partial view of what they hold."""
        return [
            block
            for block, held in self.held.items()
            if held.namespace == namespace and held.prefix[: len(tokens)] == tokens and len(self.above(held)) < len(tokens)
        ]

    def length(self, namespace, tokens):
        """The longest prefix held: nothing is held without what is before it, so each length can be asked about alone."""
        lengths = range(len(tokens) + 1)
        if not self.partial:
            lengths = range(0, len(tokens) + 1, self.block_size)
        return max(length for length in lengths if length == 0 or self.holders(namespace, tokens[:length]))

    def leaves(self, locked):
        parents = {(held.namespace, self.above(held)) for held in self.held.values()}
        full = {block for block, held in self.held.items() if (held.namespace, held.prefix) in parents}
        return [block for block in self.held if block not in full and block not in locked]


class IndexMachine(RuleBasedStateMachine):
    """Applies each operation to the index and to the model."""

    kind, policy, block_size = RadixIndex, "lru", 3

    @initialize()
    def start(self):
        self.index = self.kind(self.block_size, policy=self.policy, on_event=self.note)
        self.model = Model(self.block_size, self.kind is RadixIndex, self.policy)
        self.locks = []
        self.pins = {}
        self.void = []
        self.known = set()  # what a router knows from the events
        self.spare = []  # blocks that were let go, to be used again first
        self.last = 0
        self.queried = self.hit = self.evicted = 0

    def note(self, event):
        if hasattr(event, "tokens"):
            self.known.update(event.blocks)
        else:
            assert self.known.issuperset(event.blocks)
            self.known.difference_update(event.blocks)

    def fresh(self):
        if self.spare:
            return self.spare.pop(0)
        self.last += 1
        return self.last

    def protected(self):
        return {block for match in [*self.locks, *self.pins.values()] for block in match.blocks}

    def check_match(self, match, namespace, tokens):
        """Whatever blocks were chosen, they hold the tokens, and no other choice holds more."""
        assert match.length == self.model.length(namespace, tokens)
        ends = self.model.ends(match.length)
        assert len(match.blocks) == len(ends)
        assert match.tail == (match.length - self.block_size * (len(ends) - 1) if ends else 0)
        for block, end in zip(match.blocks, ends, strict=True):
            assert block in self.model.holders(namespace, tokens[:end])

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def match(self, tokens, namespace):
        match = self.index.match(tokens, namespace)
        self.check_match(match, namespace, tuple(tokens[:-1]))

    @rule(tokens=TOKENS, namespace=NAMESPACES, priority=st.integers(0, 2), shares=st.booleans())
    def insert(self, tokens, namespace, priority, shares):
        """A sequence with blocks of its own, or one that began with a match and has a clone of its partial tail."""
        tokens = tuple(tokens)
        match = self.index.match(tokens, namespace)
        whole = match.blocks[: match.length // self.block_size] if shares else ()
        blocks = [*whole, *[self.fresh() for _ in range(-(-len(tokens) // self.block_size) - len(whole))]]
        self.inserted(tokens, blocks, namespace, priority)

    @precondition(lambda self: self.kind is RadixIndex and self.model.held)
    @rule(data=st.data(), more=TOKENS)
    def write_on(self, data, more):
        """A sequence wrote on in the partial block that the index holds."""
        ends = [block for block, held in self.model.held.items() if len(held.prefix) % self.block_size]
        if not ends:
            return
        block = data.draw(st.sampled_from(ends), label="block")
        held = self.model.held[block]
        tokens = (*held.prefix, *more)
        before = self.index.match((*self.model.above(held), 0), held.namespace).blocks
        blocks = [*before, block]
        blocks += [self.fresh() for _ in range(-(-len(tokens) // self.block_size) - len(blocks))]
        end = min(len(tokens), (self.model.place(held) + 1) * self.block_size)
        others = [other for other in self.model.held.values() if other.namespace == held.namespace and other.prefix == tokens[:end]]
        if not others:  # else the first to hold these tokens stays, and this one stays as it was
            held.prefix = tokens[:end]
        self.inserted(tokens, blocks, held.namespace, 0)

    def inserted(self, tokens, blocks, namespace, priority):
        added = self.index.insert(tokens, blocks, namespace, priority)
        self.model.clock += 1
        expected = []
        for block, end in zip(blocks, self.model.ends(len(tokens)), strict=False):
            if not self.model.holders(namespace, tokens[:end]):
                expected.append(block)
                self.model.held[block] = Held(namespace, tokens[:end], Record(created=self.model.clock, used=self.model.clock))
        assert added == expected
        self.spare += [block for block in blocks if block not in self.model.held]
        # Where several blocks hold the tokens, the index may choose, but it touches one at each place.
        for end in self.model.ends(len(tokens)):
            holders = self.model.holders(namespace, tokens[:end])
            touched = [block for block in holders if self.record(block).used == self.model.clock]
            exact = [block for block in holders if self.model.held[block].prefix == tokens[:end]]
            assert len(touched) == 1 and touched[0] in (exact or holders)
            record = self.model.held[touched[0]].record
            record.used, record.priority = self.model.clock, max(record.priority, priority)

    def record(self, block):
        return next(node for node in self.index.nodes() if block in node.blocks)

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def lock(self, tokens, namespace):
        match = self.index.match(tokens, namespace)
        self.index.lock(match)
        self.locks.append(match)
        self.queried, self.hit = self.queried + len(tokens), self.hit + match.length
        if match.blocks:
            self.model.clock += 1
        for block in match.blocks:
            record = self.model.held[block].record
            record.used, record.uses = self.model.clock, record.uses + 1

    @precondition(lambda self: self.locks)
    @rule(data=st.data(), used=st.booleans())
    def unlock(self, data, used):
        match = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1), label="lock"))
        self.index.unlock(match, used)
        if not used:
            self.queried, self.hit = self.queried - match.queried, self.hit - match.length

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def pin(self, tokens, namespace):
        match = self.index.match([*tokens, 0], namespace)
        if not match.blocks:
            with pytest.raises(KeyError):
                self.index.pin(tokens, namespace)
            return
        assert self.index.pin(tokens, namespace) == match.length
        self.pins[namespace, tuple(tokens)] = match

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        namespace, tokens = data.draw(st.sampled_from(sorted(self.pins)), label="pin")
        self.index.unpin(tokens, namespace)
        del self.pins[namespace, tokens]

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        protected = self.protected()
        released = self.index.evict(count)
        assert len(released) == min(count, len(self.model.held) - len(protected))
        for block in released:
            leaves = self.model.leaves(protected)
            assert block in leaves
            keys = {leaf: self.model.policy(self.model.held[leaf].record) for leaf in leaves}
            assert keys[block] == min(keys.values())
            del self.model.held[block]
            self.spare.append(block)
        self.evicted += len(released)

    @precondition(lambda self: len(self.model.held) > 3)
    @rule(really=st.integers(0, 3))
    def forget(self, really):
        if really:  # not too often, or there is never much to forget
            return
        assert sorted(self.index.forget()) == sorted(self.model.held)
        self.spare += self.model.held
        self.model.held.clear()
        self.void += self.locks
        self.locks, self.pins = [], {}

    @precondition(lambda self: self.void)
    @rule()
    def unlock_void(self):
        self.index.unlock(self.void.pop())

    @invariant()
    def equals_the_model(self):
        if not hasattr(self, "model"):
            return
        check_index(self.index)
        protected = self.protected()
        assert sorted(self.index.blocks) == sorted(self.model.held) == sorted(self.known)
        assert self.index.protected == len(protected)
        assert self.index.evictable == len(self.model.held) - len(protected)
        stats = self.index.stats.values()
        assert sum(each.queried_tokens for each in stats) == self.queried
        assert sum(each.hit_tokens for each in stats) == self.hit
        assert sum(each.evicted_blocks for each in stats) == self.evicted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("kind", [HashIndex, RadixIndex])
def test_any_program_leaves_the_index_as_the_model_says(kind, block_size, policy):
    machine = type("Machine", (IndexMachine,), {"kind": kind, "block_size": block_size, "policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
