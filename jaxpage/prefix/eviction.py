"""Which prefix is evicted first: policies as data, and the queue that keeps the candidates in their order."""

import dataclasses
import heapq
import types
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["POLICIES", "EvictionQueue", "Policy", "Record", "find_policy"]

_SLACK = 64  # outdated entries that the queue carries before it looks at how many there are


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """What a policy knows of a prefix. Times are ticks of the index: its calls of `insert` and `lock`, counted.

    Attributes:
      created: when it was inserted.
      used: when it was locked or inserted last.
      uses: how often it was locked.
      priority: the highest that it was inserted with.
    """

    created: int
    used: int
    uses: int = 0
    priority: int = 0


Policy = Callable[[Record], Any]

POLICIES: Mapping[str, Policy] = types.MappingProxyType(
    {
        "lru": lambda record: record.used,
        "lfu": lambda record: (record.uses, record.used),
        "fifo": lambda record: record.created,
        "priority": lambda record: (record.priority, record.used),
    }
)


def find_policy(policy: str | Policy) -> Policy:
    """A policy by its name, or a function of one's own: what gives the lowest key is evicted first.

    Raises:
      ValueError: there is no policy of that name.
    """
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"the eviction policy must be one of {', '.join(POLICIES)}, or a function of a Record; got {policy!r}")
    return POLICIES[policy]


class EvictionQueue[Item: Record]:
    """The candidates, lowest key first.

    A change of a candidate's key adds an entry and outdates the old one, which is passed over when its turn comes. So every operation
    takes O(log m) amortised for m candidates, whatever way a policy's keys move.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._heap: list[tuple[Any, int, Item]] = []
        self._newest: dict[Item, int] = {}  # each candidate's entry that counts
        self._entries = 0

    def push(self, item: Item) -> None:
        """Adds a candidate, or gives one its present key."""
        self._entries += 1
        self._newest[item] = self._entries
        heapq.heappush(self._heap, (self._policy(item), self._entries, item))
        if len(self._heap) > 2 * len(self._newest) + _SLACK:
            self._heap = [entry for entry in self._heap if self._newest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def refresh(self, item: Item) -> None:
        """Gives a candidate its present key, and leaves others alone."""
        if item in self._newest:
            self.push(item)

    def discard(self, item: Item) -> None:
        """Takes a candidate out, if it is one."""
        self._newest.pop(item, None)

    def pop(self) -> Item | None:
        """Takes out the first candidate; None where there is none."""
        while self._heap:
            _, entry, item = heapq.heappop(self._heap)
            if self._newest.get(item) == entry:
                del self._newest[item]
                return item
        return None

    def items(self) -> list[Item]:
        """The candidates in the order in which they were pushed last, which decides between equal keys."""
        return sorted(self._newest, key=self._newest.__getitem__)

    def clear(self) -> None:
        """Takes out all."""
        self._heap.clear()
        self._newest.clear()
