"""Serving under one KV memory budget: paging against three contiguous reservations, at rising request rates.

All four run on the same engine, kernels and pool, in wall-clock time; they differ in when a request may start. The reservations are those
of Kwon et al. (2023): the maximum, the next power of two, and exactly what a request will come to need, which nobody can know. Their memory
never fragments here, which is in their favour. Weights are random: times do not depend on them.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from experiments.block_sizes import check_block_sizes
from experiments.decode_step import decoder
from experiments.experiment import Experiment, Point, Row
from experiments.lengths import check_source, load_lengths
from experiments.serving import Arrival, Reservation, Sample, poisson, serve
from experiments.serving_report import MAXIMUM, PAGED, SYSTEMS, report
from jaxpage import SamplingParams
from jaxpage.engine import Engine, EngineOptions
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features

__all__ = ["EXPERIMENT", "PagedVsContiguous"]

_SAMPLES = 200  # moments that a row keeps of the memory over time


@dataclasses.dataclass(frozen=True)
class PagedVsContiguous:
    """A serving run for each system, request rate and seed."""

    model: Literal["tiny", "smollm2-135m"] = "tiny"
    """Whose sizes the decoder has; its weights are random."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and cache."""
    lengths: str = "short_chat"
    """short_chat, long_chat, code, or the path of a trace."""
    requests: int = 200
    """Requests of a run."""
    rates_per_s: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0)
    """Requests a second; 0 lets all arrive at once."""
    budget_tokens: int = 4096
    """Tokens that the KV memory holds."""
    max_length: int = 512
    """Most tokens of a request, and what the first baseline reserves; longer requests are cut."""
    block_size: int = 16
    """Tokens a KV block holds."""
    max_seqs: int = 64
    """Most sequences that run at a time."""
    repeats: int = 3
    """Runs of each system and rate, with seeds of their own."""
    seed: int = 0
    """Seed of the first run: lengths, arrivals, prompts and weights."""

    def __post_init__(self) -> None:
        check_source(self.lengths)
        check_block_sizes((self.block_size,))
        if min(self.requests, self.max_length, self.max_seqs, self.repeats) < 1 or not self.rates_per_s or min(self.rates_per_s) < 0:
            raise ValueError("requests, max_length, max_seqs and repeats must be positive, and rates_per_s not negative")
        if self.budget_tokens < self.max_length or self.budget_tokens % self.block_size or self.max_length % self.block_size:
            given = f"{self.budget_tokens} and {self.max_length} with blocks of {self.block_size}"
            raise ValueError(f"budget_tokens must hold max_length, both in whole blocks; got {given}")


def _points(config: PagedVsContiguous) -> Iterator[Point]:
    for rate in config.rates_per_s:
        for repeat in range(config.repeats):
            for system in SYSTEMS:  # side by side in time, so that a slow hour slows them all
                yield {"system": system, "rate_per_s": rate, "repeat": repeat}


def _reservation(config: PagedVsContiguous, system: str) -> Reservation | None:
    """What a system reserves for a request, in whole blocks, because the pool that all run on has no others."""

    def whole(tokens: int) -> int:
        return min(-(-tokens // config.block_size) * config.block_size, config.max_length)

    reservations: dict[str, Reservation | None] = {
        MAXIMUM: lambda tokens: config.max_length,
        "power of two": lambda tokens: whole(1 << (tokens - 1).bit_length()),
        "foresight": whole,
        PAGED: None,
    }
    return reservations[system]


def _arrivals(config: PagedVsContiguous, rate: float, repeat: int) -> list[Arrival]:
    rng = np.random.default_rng([config.seed, repeat])
    lengths = load_lengths(config.lengths, config.requests, config.seed + repeat)
    times = poisson(rate or None, config.requests, rng)
    arrivals = []
    for moment, prompt, output in zip(times, lengths.prompt, lengths.output, strict=False):
        size = int(np.clip(prompt, 1, config.max_length - 1))
        arrivals.append(Arrival(float(moment), rng.integers(0, 1000, size).tolist(), int(np.clip(output, 1, config.max_length - size))))
    return arrivals


@functools.lru_cache(maxsize=1)
def _programs(config: PagedVsContiguous) -> Programs:
    """Compiled programs that all runs share; a first engine compiles everything, so that no run has to."""
    programs = Programs()
    _engine(config, programs).warmup()
    return programs


def _engine(config: PagedVsContiguous, programs: Programs) -> Engine:
    options = EngineOptions(
        num_blocks=config.budget_tokens // config.block_size + 1,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_length=config.max_length,
        cache_dtype=config.dtype,
        prefix_index="none",
        features=Features.of([SamplingParams(ignore_eos=True)], ()),
    )
    return Engine(decoder(config.model, config.dtype, config.seed), options, programs=programs)


def _measure(config: PagedVsContiguous, point: Point) -> Row:
    engine = _engine(config, _programs(config))
    arrivals = _arrivals(config, point["rate_per_s"], point["repeat"])
    begin = time.process_time()
    served, samples = serve(engine, arrivals, _reservation(config, point["system"]))
    processor_s = time.process_time() - begin
    latencies = [each.end_s - each.arrival_s for each in served]
    firsts = [each.first_s - each.arrival_s for each in served]
    seconds = max(each.end_s for each in served) - served[0].arrival_s
    budget = config.budget_tokens
    kept = samples[:: -(-len(samples) // _SAMPLES)]
    return {
        "requests": len(served),
        "tokens_per_s": sum(each.output_tokens for each in served) / seconds,
        "tokens_per_processor_s": sum(each.output_tokens for each in served) / processor_s,
        "requests_per_s": len(served) / seconds,
        "mean_latency_s": statistics.fmean(latencies),
        "p95_latency_s": float(np.percentile(latencies, 95)),
        "mean_first_token_s": statistics.fmean(firsts),
        "memory_use_percent": 100 * _mean(samples, "used") / _mean(samples, "reserved"),
        "budget_use_percent": 100 * _mean(samples, "used") / budget,
        "preemptions": engine.stats().preemptions,
        "timeline": [[round(each.at_s, 2), round(100 * each.used / budget, 1)] for each in kept],
    }


def _mean(samples: Sequence[Sample], field: str) -> float:
    """The mean over time; a sample counts for the time since the one before it."""
    times = np.diff([0.0, *(each.at_s for each in samples)])
    return float(np.average([getattr(each, field) for each in samples], weights=times))


_QUICK = PagedVsContiguous(requests=40, rates_per_s=(2.0, 8.0, 0.0), repeats=1, budget_tokens=2048, max_seqs=32)

EXPERIMENT = Experiment(PagedVsContiguous, _QUICK, _points, _measure, report)
