"""Random programs on a cache against a model of plain lists and dicts that counts every reference by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import jaxpage
from jaxpage import block_pool

NUM_SEQS, WIDTH = 4, 4
ROWS = range(NUM_SEQS)

# Compiled once for each block size, as a whole: the pool and the table differ in shape by machine only.
jitted = functools.partial(jax.jit, donate_argnums=0)
reserve = jitted(jaxpage.reserve)
reserve_one = jitted(functools.partial(jaxpage.reserve, max_new_blocks=1))
release, fork, truncate, attach = map(jitted, (jaxpage.release, jaxpage.fork, jaxpage.truncate, jaxpage.attach))
hold = jitted(lambda cache, blocks: cache._replace(pool=block_pool.hold(cache.pool, blocks)))
drop = jitted(lambda cache, blocks: cache._replace(pool=block_pool.drop(cache.pool, blocks)))


def ints(values):
    return jnp.asarray(np.asarray(values, np.int32))


class Model:
    """What the cache must hold: a stack of free blocks, a count for each block in use, and each row's blocks and length."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks - 1, 0, -1))
        self.refs = {}
        self.rows = [[] for _ in ROWS]
        self.lengths = [0] * NUM_SEQS
        self.index = []  # one entry a hold

    def blocks_for(self, length):
        return (length + self.block_size - 1) // self.block_size

    def take(self):
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def hold(self, blocks):
        for block in blocks:
            self.refs[block] += 1

    def drop(self, blocks):
        """The blocks that this leaves unused are free again, the highest on top."""
        for block in blocks:
            self.refs[block] -= 1
        for block in sorted(set(blocks)):
            if self.refs[block] == 0:
                del self.refs[block]
                self.free.append(block)

    def reserve(self, goals, limit=WIDTH):
        oks, waiting, copied = [], False, []
        # A shared block counts as shared for all of its owners of this call, whoever is served first.
        shared = {block for block, count in self.refs.items() if count > 1}
        for row, goal in enumerate(goals):
            length, blocks = self.lengths[row], self.rows[row]
            if goal <= length:
                oks.append(True)
                continue
            fresh = self.blocks_for(goal) - len(blocks)
            copies = length % self.block_size != 0 and blocks[-1] in shared
            need = fresh + copies
            if len(blocks) + fresh > WIDTH or fresh > limit:
                oks.append(False)
                continue
            waiting = waiting or need > len(self.free)
            if waiting and need:
                oks.append(False)
                continue
            if copies:
                copied.append(blocks[-1])
                blocks[-1] = self.take()
            blocks.extend(self.take() for _ in range(fresh))
            self.lengths[row] = goal
            oks.append(True)
        for block in copied:  # the originals are let go once all blocks of the call are handed out
            self.drop([block])
        return oks

    def truncate(self, goals):
        dropped = []
        for row, goal in enumerate(goals):
            self.lengths[row] = max(0, min(goal, self.lengths[row]))
            keep = self.blocks_for(self.lengths[row])
            dropped += self.rows[row][keep:]
            self.rows[row] = self.rows[row][:keep]
        self.drop(dropped)

    def fork(self, pairs):
        origin = list(ROWS)
        for source, target in pairs:
            if source in ROWS and target in ROWS:
                origin[target] = source
        rows, lengths = [list(self.rows[row]) for row in origin], [self.lengths[row] for row in origin]
        moved = [row for row in ROWS if origin[row] != row]
        self.hold(block for row in moved for block in rows[row])
        self.drop([block for row in moved for block in self.rows[row]])
        self.rows, self.lengths = rows, lengths

    def attach(self, seq, blocks, length):
        count = self.blocks_for(length)
        if self.lengths[seq] or count > min(WIDTH, len(blocks)) or any(block not in self.refs for block in blocks[:count]):
            return False
        self.rows[seq], self.lengths[seq] = list(blocks[:count]), length
        self.hold(blocks[:count])
        return True


class CacheMachine(RuleBasedStateMachine):
    """Applies each operation to the cache and to the model."""

    num_blocks, block_size = 8, 4

    @initialize()
    def start(self):
        config = jaxpage.CacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_seqs=NUM_SEQS,
            max_blocks_per_seq=WIDTH,
        )
        self.cache = jaxpage.init_cache(config, "xla")
        self.model = Model(self.num_blocks, self.block_size)

    def goals(self, data, most):
        return data.draw(st.lists(st.integers(-1, most), min_size=NUM_SEQS, max_size=NUM_SEQS), label="lengths")

    @rule(data=st.data())
    def reserve(self, data):
        goals = self.goals(data, WIDTH * self.block_size + 1)
        self.cache, ok = reserve(self.cache, ints(goals))
        assert ok.tolist() == self.model.reserve(goals)

    @rule(active=st.lists(st.booleans(), min_size=NUM_SEQS, max_size=NUM_SEQS), several=st.integers(1, 6))
    def append(self, active, several):
        goals = [length + several * grows for length, grows in zip(self.model.lengths, active, strict=True)]
        self.cache, ok = reserve_one(self.cache, ints(goals))
        assert ok.tolist() == self.model.reserve(goals, limit=1)

    @rule(data=st.data())
    def truncate(self, data):
        goals = self.goals(data, WIDTH * self.block_size)
        self.cache = truncate(self.cache, ints(goals))
        self.model.truncate(goals)

    @rule(ends=st.lists(st.booleans(), min_size=NUM_SEQS, max_size=NUM_SEQS))
    def release(self, ends):
        self.cache = release(self.cache, jnp.asarray(ends))
        self.model.truncate([0 if end else length for end, length in zip(ends, self.model.lengths, strict=True)])

    @rule(
        sources=st.lists(st.integers(-1, NUM_SEQS), min_size=NUM_SEQS, max_size=NUM_SEQS),
        onto=st.permutations(range(-1, NUM_SEQS + 1)),
    )
    def fork(self, sources, onto):
        pairs = list(zip(sources, onto[:NUM_SEQS], strict=True))
        self.cache = fork(self.cache, ints(sources), ints(onto[:NUM_SEQS]))
        self.model.fork(pairs)

    @precondition(lambda self: self.model.refs)
    @rule(data=st.data(), seq=st.sampled_from(ROWS))
    def attach(self, data, seq):
        live = data.draw(st.permutations(sorted(self.model.refs)), label="live blocks")[:WIDTH]
        stale = data.draw(st.sampled_from(range(self.num_blocks + 1)), label="a block that may be anything")
        blocks = [*live, *[block for block in [stale] if block not in live], *[0] * WIDTH][:WIDTH]
        length = data.draw(st.integers(0, WIDTH * self.block_size + 1), label="length")
        self.cache, ok = attach(self.cache, jnp.int32(seq), ints(blocks), jnp.int32(length))
        assert bool(ok) == self.model.attach(seq, blocks, length)

    @precondition(lambda self: self.model.refs)
    @rule(data=st.data())
    def hold(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.model.refs)), min_size=1, max_size=WIDTH), label="blocks")
        self.cache = hold(self.cache, ints(blocks + [0] * (WIDTH - len(blocks))))
        self.model.hold(blocks)
        self.model.index += blocks

    @precondition(lambda self: self.model.index)
    @rule(data=st.data())
    def drop(self, data):
        places = data.draw(st.lists(st.integers(0, len(self.model.index) - 1), min_size=1, max_size=WIDTH, unique=True), label="holds")
        blocks = [self.model.index[place] for place in places]
        self.cache = drop(self.cache, ints(blocks + [0] * (WIDTH - len(blocks))))
        self.model.drop(blocks)
        self.model.index = [block for place, block in enumerate(self.model.index) if place not in places]

    @invariant()
    def equals_the_model(self):
        if not hasattr(self, "cache"):
            return
        jaxpage.check_cache(self.cache, holds=np.asarray(self.model.index, np.int32))
        pool, table = jax.device_get((self.cache.pool, self.cache.table))
        assert table.lengths.tolist() == self.model.lengths
        assert table.blocks.tolist() == [row + [0] * (WIDTH - len(row)) for row in self.model.rows]
        assert pool.refs.tolist() == [self.model.refs.get(block, 0) for block in range(self.num_blocks)]
        assert pool.free[: int(pool.num_free)].tolist() == self.model.free


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 9), (4, 8), (16, 6)])
def test_any_program_leaves_the_cache_as_the_model_says(block_size, num_blocks):
    machine = type("Machine", (CacheMachine,), {"block_size": block_size, "num_blocks": num_blocks})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
