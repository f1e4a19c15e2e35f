"""Serves requests that arrive over time through the engine, in wall-clock time, and notes when each got its tokens."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpage import SamplingParams
from jaxpage.engine import Engine

__all__ = ["Arrival", "Reservation", "Sample", "Served", "poisson", "serve"]


class Arrival(NamedTuple):
    """A request: when it arrives after the start, its prompt, and how many tokens it generates."""

    arrival_s: float
    prompt: list[int]
    output_tokens: int


@dataclasses.dataclass
class Served:
    """A request's times, in seconds after the start."""

    arrival_s: float
    output_tokens: int
    start_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0


class Sample(NamedTuple):
    """The memory at one moment, in tokens' places: those that hold a token, and those that nobody else can have."""

    at_s: float
    used: int
    reserved: int


Reservation = Callable[[int], int]
"""Places reserved for a request that comes to hold so many tokens."""


def serve(
    engine: Engine, arrivals: Sequence[Arrival], reservation: Reservation | None, *, in_batches: bool = False
) -> tuple[list[Served], list[Sample]]:
    """Runs all requests to their end.

    Args:
      engine: without requests.
      arrivals: in the order of arrival.
      reservation: None: the engine decides who starts, and a request's blocks are what is reserved. Else a request reaches the engine
        only when its reservation fits beside those of all that have not ended, first come, first served: contiguous reservation with an
        allocator that never fragments.
      in_batches: static batching: those that wait and fit, in the order of arrival, are a batch, and the next batch starts only when all of
        this one have ended. It needs a reservation, which says how large a batch is.
    """
    if in_batches and reservation is None:
        raise ValueError("static batching needs a reservation, which says how large a batch is")
    size, start = engine.options.block_size, time.perf_counter()
    budget = (engine.options.num_blocks - 1) * size
    coming, queue = deque(enumerate(arrivals)), deque[int]()
    served = [Served(each.arrival_s, each.output_tokens) for each in arrivals]
    places = [0 if reservation is None else reservation(len(each.prompt) + each.output_tokens) for each in arrivals]
    if max(places) > budget:
        raise ValueError(f"a request reserves {max(places)} tokens, the pool holds {budget}")
    reserved, left = 0, len(arrivals)
    most = engine.options.max_seqs if in_batches else left  # that start at a time
    samples: list[Sample] = []
    while left:
        now = time.perf_counter() - start
        while coming and coming[0][1].arrival_s <= now:
            queue.append(coming.popleft()[0])
        starts = 0 if in_batches and engine.unfinished else most
        while queue and starts and reserved + places[queue[0]] <= budget:
            starts -= 1
            number = queue.popleft()
            reserved += places[number]
            one = arrivals[number]
            served[number].start_s = now
            engine.submit(one.prompt, SamplingParams(max_tokens=one.output_tokens, ignore_eos=True), request_id=number)
        if not engine.unfinished:
            time.sleep(max(0.0, coming[0][1].arrival_s - (time.perf_counter() - start)))
            continue
        updates = engine.step()
        now = time.perf_counter() - start
        used = engine.usage()
        samples.append(Sample(now, used.slots_used, used.slots_reserved if reservation is None else reserved))
        for update in updates:
            each = served[update.prompt_index]
            if update.token_ids and not each.first_s:
                each.first_s = now
            if update.completion is not None:
                assert len(update.completion.token_ids) == each.output_tokens, update.completion.finish_reason
                each.end_s = now
                reserved -= places[update.prompt_index]
                left -= 1
    return served, samples


def poisson(rate_per_s: float | None, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of a Poisson process; None: all at once."""
    return np.zeros(count) if rate_per_s is None else np.cumsum(rng.exponential(1 / rate_per_s, count))
