"""Which replica a request goes to."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

from experiments.replica import Replica

__all__ = ["ROUTERS", "Router"]

_CHUNK = 64  # tokens that the cache-aware router remembers at a time
_SLACK = 4  # requests that a replica may have beyond the mean load before its prefixes are passed over


class Router(Protocol):
    """Chooses a replica for each request."""

    def __call__(self, prompt: Int[np.ndarray, " n"]) -> Replica:
        """The replica that serves this prompt."""


class _Random:
    def __init__(self, replicas: Sequence[Replica], rng: np.random.Generator):
        self._replicas, self._rng = replicas, rng

    def __call__(self, prompt: Int[np.ndarray, " n"]) -> Replica:
        return self._replicas[int(self._rng.integers(len(self._replicas)))]


class _RoundRobin:
    def __init__(self, replicas: Sequence[Replica], rng: np.random.Generator):
        self._replicas, self._next = replicas, 0

    def __call__(self, prompt: Int[np.ndarray, " n"]) -> Replica:
        self._next = (self._next + 1) % len(self._replicas)
        return self._replicas[self._next]


class _CacheAware:
    """Remembers where it sent each prefix last; the longest prefix it knows decides, unless its replica has too much to do."""

    def __init__(self, replicas: Sequence[Replica], rng: np.random.Generator):
        self._replicas = replicas
        self._sent: dict[int, Replica] = {}  # hash of the tokens up to the end of a chunk

    def __call__(self, prompt: Int[np.ndarray, " n"]) -> Replica:
        keys, key = [], 0
        for start in range(0, len(prompt) - _CHUNK + 1, _CHUNK):
            key = hash((key, prompt[start : start + _CHUNK].tobytes()))
            keys.append(key)
        known = next((self._sent[each] for each in reversed(keys) if each in self._sent), None)
        mean = sum(replica.load for replica in self._replicas) / len(self._replicas)
        least = min(self._replicas, key=lambda replica: replica.load)
        chosen = known if known is not None and known.load <= mean + _SLACK else least
        self._sent.update(dict.fromkeys(keys, chosen))
        return chosen


ROUTERS: Mapping[str, Callable[[Sequence[Replica], np.random.Generator], Router]] = types.MappingProxyType(
    {"random": _Random, "round_robin": _RoundRobin, "cache_aware": _CacheAware}
)
"""Routers by name: functions of the replicas and a source of random numbers."""
