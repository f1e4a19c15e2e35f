"""One simulated replica: a real prefix index and real block counts, under simulated time."""

import dataclasses
from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy
from jaxtyping import Int

from experiments.step_time import StepTime
from jaxpage.prefix import HashIndex, Match

__all__ = ["Replica", "Served"]

_STEPS = 8  # decode steps from one look at the queue to the next


@dataclasses.dataclass(eq=False)
class Served:
    """A request, and when it was served."""

    prompt: Int[np.ndarray, " n"]
    output: Int[np.ndarray, " m"]
    arrival_s: float
    done: simpy.Event
    hit_tokens: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def output_tokens(self) -> int:
        """Tokens that are generated."""
        return len(self.output)


@dataclasses.dataclass(eq=False)
class _Running:
    request: Served
    match: Match
    blocks: list[int]
    made: int = 1  # the first token comes with the prompt


class Replica:
    """Serves requests first come, first served, with continuous batching; a request gets all its blocks when it starts.

    Raises:
      ValueError: a request can never fit the pool.
    """

    def __init__(self, env: simpy.Environment, time: StepTime, *, block_size: int, pool_blocks: int, max_batch: int):
        self.env, self._time, self._max_batch, self._pool_blocks = env, time, max_batch, pool_blocks
        self.index = HashIndex(block_size)
        self.waiting: deque[Served] = deque()
        self.running: list[_Running] = []
        self._free = list(range(1, pool_blocks + 1))
        self._wake = env.event()
        env.process(self._serve())

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def put(self, request: Served) -> None:
        """Takes a request; its event `done` tells the end."""
        if self._blocks(request) > self._pool_blocks:
            raise ValueError(f"a request needs {self._blocks(request)} blocks, a replica has {self._pool_blocks}; raise pool_blocks")
        self.waiting.append(request)
        if not self._wake.triggered:
            self._wake.succeed()

    def _blocks(self, request: Served) -> int:
        return -(-(request.prompt_tokens + request.output_tokens) // self.index.block_size)

    def _serve(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if not self.load:
                self._wake = self.env.event()
                yield self._wake
            elif self.waiting and len(self.running) < self._max_batch and (started := self._start(self.waiting[0])) is not None:
                request = self.waiting.popleft()
                yield self.env.timeout(self._time.prefill_s(request.prompt_tokens - request.hit_tokens))
                request.first_s = self.env.now
                self.running.append(started)
            else:
                yield from self._decode()

    def _start(self, request: Served) -> _Running | None:
        """Takes the request's blocks; None where there are not enough."""
        match = self.index.match(request.prompt)
        self.index.lock(match)
        need = self._blocks(request) - len(match.blocks)
        if need > len(self._free) + self.index.evictable:
            self.index.unlock(match, used=False)
            return None
        self._free += self.index.evict(max(0, need - len(self._free)))
        request.hit_tokens = match.length
        return _Running(request, match, [*match.blocks, *(self._free.pop() for _ in range(need))])

    def _decode(self) -> Generator[simpy.Event, Any, None]:
        left = [each.request.output_tokens - each.made for each in self.running]
        steps = max(0, min(_STEPS, *left))
        context = sum(each.request.prompt_tokens + each.made for each in self.running)
        yield self.env.timeout(steps * self._time.decode_s(len(self.running), context))
        for each in list(self.running):
            each.made += steps
            if each.made >= each.request.output_tokens:
                self._end(each)

    def _end(self, ended: _Running) -> None:
        self.running.remove(ended)
        request = ended.request
        tokens = np.concatenate([request.prompt, request.output])[:-1]  # the last token is never computed
        own = ended.blocks[len(ended.match.blocks) :]
        taken = set(self.index.insert(tokens, ended.blocks[: -(-len(tokens) // self.index.block_size)]))
        self._free += [block for block in own if block not in taken]
        self.index.unlock(ended.match)
        request.end_s = self.env.now
        request.done.succeed()
