"""Rows of `engine_bench`: how long users of one prefix wait for their first token, and how much of a run is the host's own work."""

import collections
import functools
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.decode_step import decoder
from experiments.experiment import Point, Row
from jaxpage import SamplingParams
from jaxpage.engine import Engine, EngineOptions
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features

if TYPE_CHECKING:
    from experiments.engine_bench import EngineBench

__all__ = ["ARRIVALS", "ONE_BY_ONE", "TOGETHER", "first_tokens", "host_row", "prefix_row"]

ONE_BY_ONE, TOGETHER = "one by one", "together"
ARRIVALS = (ONE_BY_ONE, TOGETHER)
"""Each user comes when the one before has a first token; or all others do when the first user has one."""

_HOST_PROMPT_TOKENS = 16


@functools.lru_cache(maxsize=1)
def _programs(config: "EngineBench") -> Programs:
    """Compiled programs that all runs share, so that none compiles."""
    programs = Programs()
    _engine(config, "none", programs).warmup()
    return programs


def _engine(config: "EngineBench", index: str, programs: Programs) -> Engine:
    seqs = max(config.users, config.host_seqs)
    length = max(config.prefix_tokens + config.own_tokens + config.user_output_tokens, _HOST_PROMPT_TOKENS + config.host_tokens)
    options = EngineOptions(
        num_blocks=(seqs + 1) * (-(-length // config.block_size) + 1) + 1,
        block_size=config.block_size,
        max_seqs=seqs,
        max_length=length,
        cache_dtype=config.dtype,
        prefix_index=index,
        tokens_per_pass=config.tokens_per_pass,
        features=Features.of([SamplingParams(ignore_eos=True)], ()),
    )
    return Engine(decoder(config.model, config.dtype, config.seed), options, programs=programs)


def first_tokens(engine: Engine, prompts: Sequence[list[int]], output_tokens: int, arrival: str) -> list[float]:
    """Serves users, the first of them alone at first; seconds from the arrival of each to the first token. Runs them to their ends."""
    coming = collections.deque(prompts)
    arrived: dict[int, float] = {}
    waits: dict[int, float] = {}

    def arrive(count: int) -> None:
        for _ in range(min(count, len(coming))):
            now = time.perf_counter()
            arrived[engine.submit(coming.popleft(), SamplingParams(max_tokens=output_tokens, ignore_eos=True))] = now

    arrive(1)
    while engine.unfinished:
        for update in engine.step():
            if update.token_ids and update.prompt_index not in waits:
                waits[update.prompt_index] = time.perf_counter() - arrived[update.prompt_index]
                arrive(1 if arrival == ONE_BY_ONE else len(coming))
    return [waits[name] for name in arrived]


def prefix_row(config: "EngineBench", point: Point) -> Row:
    """Waits for the first token: medians over the repeats, each with an engine and tokens of its own."""
    runs = []
    hit = 0
    for repeat in range(config.repeats):
        engine = _engine(config, point["index"], _programs(config))
        rng = np.random.default_rng([config.seed, repeat])
        stranger, prefix = rng.integers(0, 4096, (2, config.prefix_tokens)).tolist()
        first_tokens(engine, [stranger], 2, ONE_BY_ONE)  # touches memory and threads; nobody shares it
        prompts = [[*prefix, *rng.integers(0, 4096, config.own_tokens).tolist()] for _ in range(config.users)]
        runs.append(first_tokens(engine, prompts, config.user_output_tokens, point["arrival"]))
        hit = engine.stats().hit_tokens
    return {
        "users": config.users,
        "first_user_ms": 1e3 * statistics.median(run[0] for run in runs),
        "others_ms": 1e3 * statistics.median(statistics.fmean(run[1:]) for run in runs),
        "slowest_ms": 1e3 * statistics.median(max(run[1:]) for run in runs),
        "ratio": statistics.median(statistics.fmean(run[1:]) / run[0] for run in runs),
        "slowest_ratio": statistics.median(max(run[1:]) / run[0] for run in runs),
        "hit_tokens": hit,
        "waits_ms": [round(1e3 * statistics.median(each), 2) for each in zip(*runs, strict=True)],
    }


def host_row(config: "EngineBench", point: Point) -> Row:
    """A run that nearly only decodes: where the time of the thread goes that drives the engine."""
    runs = []
    for repeat in range(config.repeats + 1):
        engine = _engine(config, "radix", _programs(config))
        rng = np.random.default_rng([config.seed, repeat])
        prompts = rng.integers(0, 4096, (config.host_seqs, _HOST_PROMPT_TOKENS)).tolist()
        start, busy = time.perf_counter(), time.thread_time()
        for prompt in prompts:
            engine.submit(prompt, SamplingParams(max_tokens=config.host_tokens, ignore_eos=True))
        while engine.unfinished:
            engine.step()
        wall, busy = time.perf_counter() - start, time.thread_time() - busy
        stats = engine.stats()
        runs.append((wall, stats.host_seconds, stats.wait_seconds, busy, stats.passes))
    wall, host, wait, busy, passes = (statistics.median(each) for each in zip(*runs[1:], strict=True))  # the first only warms up
    return {
        "seqs": config.host_seqs,
        "new_tokens": config.host_tokens,
        "seconds": wall,
        "tokens_per_s": config.host_seqs * config.host_tokens / wall,
        "passes": passes,
        "host_seconds": host,
        "wait_seconds": wait,
        "host_percent": 100 * statistics.median(run[1] / run[0] for run in runs[1:]),
        "thread_percent": 100 * statistics.median(run[3] / run[0] for run in runs[1:]),
        "host_ms_a_pass": 1e3 * host / passes,
    }
