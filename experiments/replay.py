"""Replays requests against a prefix index, one at a time, and counts what it hits."""

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.workloads import Request
from jaxpage.prefix import HashIndex, PrefixIndex, RadixIndex

__all__ = ["INDEXES", "SCHEDULES", "Hits", "replay"]

INDEXES: Mapping[str, Callable[[int, str], PrefixIndex]] = types.MappingProxyType({"hash": HashIndex, "radix": RadixIndex})
"""Indexes by name: functions of block size and eviction policy."""


class Hits(NamedTuple):
    """What was found.

    Attributes:
      findable_tokens: prompt tokens but each prompt's last, which is always computed.
      hit_tokens: those of them that were found.
      evicted_blocks: blocks that had to go.
    """

    findable_tokens: int
    hit_tokens: int
    evicted_blocks: int

    @property
    def percent(self) -> float:
        """Share of the prompt tokens that need not be computed, of those that could be found."""
        return 100 * self.hit_tokens / self.findable_tokens


Schedule = Callable[[PrefixIndex, Sequence[Request]], int]


def _first_come(index: PrefixIndex, waiting: Sequence[Request]) -> int:
    return 0


def _longest_prefix(index: PrefixIndex, waiting: Sequence[Request]) -> int:
    return int(np.argmax([index.match(request.prompt).length for request in waiting]))  # the first of equals


SCHEDULES: Mapping[str, Schedule] = types.MappingProxyType({"first_come": _first_come, "longest_prefix": _longest_prefix})
"""Which of the waiting requests is served next, by name."""


def replay(
    index: PrefixIndex,
    requests: Sequence[Request],
    capacity_blocks: int | None,
    *,
    schedule: Schedule = _first_come,
    queue: int = 1,
) -> Hits:
    """Serves requests one after the other: look up, lock, insert what was computed, and evict down to the capacity.

    Block ids come from a counter and from what was evicted: the index needs no more of a pool. A request longer than the cache keeps its
    beginning only. A request's blocks are inserted when it has ended, without the last token generated, which is never computed.

    Args:
      index: an empty index; it is filled.
      requests: in the order of arrival.
      capacity_blocks: most blocks that the index holds after a request; None: no limit.
      schedule: chooses among those that wait and do not go on from one that waits too.
      queue: how many wait at a time.
    """
    findable = hit = evicted = used = 0
    free: list[int] = []
    arriving = iter(enumerate(requests))
    waiting = list(itertools.islice(arriving, queue))
    served: set[int | None] = {None}
    while waiting:
        ready = [(number, request) for number, request in waiting if request.after in served]
        number, request = ready[schedule(index, [request for _, request in ready])]
        served.add(number)
        waiting = [(other, each) for other, each in waiting if other != number]
        waiting += itertools.islice(arriving, 1)
        match = index.match(request.prompt)
        index.lock(match)
        findable, hit = findable + match.queried - 1, hit + match.length
        tokens = np.concatenate([request.prompt, request.output])[:-1]
        if capacity_blocks is not None:
            tokens = tokens[: capacity_blocks * index.block_size]
        count = -(-len(tokens) // index.block_size)
        own = list(match.blocks[: match.length // index.block_size])[:count]
        while len(free) < count - len(own):
            used += 1
            free.append(used)
        blocks = [*own, *(free.pop() for _ in range(count - len(own)))]
        taken = set(index.insert(tokens, blocks))
        free += [block for block in blocks[len(own) :] if block not in taken]
        index.unlock(match)
        if capacity_blocks is not None and index.total > capacity_blocks:
            released = index.evict(index.total - capacity_blocks)
            evicted += len(released)
            free += released
    return Hits(findable, hit, evicted)
