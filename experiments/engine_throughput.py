"""Rows of `engine_bench`: continuous batching against static batching, from the same KV memory.

All systems run on the same engine, kernels and pool; they differ in when a request may start. Static batching is what a plain server does:
the requests that fit are a batch, and the next batch starts when all of this one have ended.
"""

import functools
import statistics
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.decode_step import decoder
from experiments.experiment import Point, Row
from experiments.lengths import load_lengths
from experiments.serving import Arrival, Reservation, serve
from jaxpage import SamplingParams
from jaxpage.engine import Engine, EngineOptions
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features

if TYPE_CHECKING:
    from experiments.engine_bench import EngineBench

__all__ = ["CONTINUOUS", "STATIC", "STATIC_PAGED", "SYSTEMS", "Workload", "make_workload", "run_workload", "throughput_row"]

CONTINUOUS, STATIC, STATIC_PAGED = "continuous, paged", "static, reserved", "static, paged"
SYSTEMS = (STATIC, STATIC_PAGED, CONTINUOUS)
"""What is compared. `static, reserved` reserves the longest request's tokens for each; `static, paged` only each one's own blocks, as if it
knew how long the outputs will be."""


class Workload(NamedTuple):
    """Requests that are all there at the beginning.

    Attributes:
      arrivals: the requests.
      scale: what all lengths were divided by, so that the longest request fits.
      longest: tokens of the longest one, in whole blocks: what static batching reserves for each.
    """

    arrivals: list[Arrival]
    scale: float
    longest: int


@functools.lru_cache(maxsize=1)
def make_workload(config: "EngineBench") -> Workload:
    """The first requests of a trace, or of a distribution."""
    lengths = load_lengths(config.lengths, config.requests, config.seed)
    prompts, outputs = (each[: config.requests] for each in lengths)
    scale = max(1.0, float(np.max(prompts + outputs)) / config.max_length)
    rng = np.random.default_rng(config.seed)
    arrivals = []
    for prompt, output in zip(prompts, outputs, strict=True):
        size = int(np.clip(prompt // scale, 1, config.max_length - 1))
        arrivals.append(Arrival(0.0, rng.integers(0, 4096, size).tolist(), int(np.clip(output // scale, 1, config.max_length - size))))
    longest = max(len(each.prompt) + each.output_tokens for each in arrivals)
    return Workload(arrivals, scale, _whole(longest, config.block_size))


def _whole(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) * block_size


@functools.lru_cache(maxsize=1)
def _programs(config: "EngineBench") -> Programs:
    """Compiled programs that all runs share. A first engine compiles them and runs a little, so that no run has to."""
    programs = Programs()
    engine = _engine(config, programs)
    engine.warmup()
    serve(engine, [each._replace(output_tokens=1) for each in make_workload(config).arrivals[:2]], None)
    return programs


def _engine(config: "EngineBench", programs: Programs) -> Engine:
    """An engine whose pool holds `static_batch` requests of the longest kind."""
    longest = make_workload(config).longest
    options = EngineOptions(
        num_blocks=config.static_batch * longest // config.block_size + 1,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_length=longest,
        cache_dtype=config.dtype,
        prefix_index="none",
        tokens_per_pass=config.tokens_per_pass,
        features=Features.of([SamplingParams(ignore_eos=True)], ()),
    )
    return Engine(decoder(config.model, config.dtype, config.seed), options, programs=programs)


def throughput_row(config: "EngineBench", point: Point) -> Row:
    """One system's run of all requests."""
    workload, engine = make_workload(config), _engine(config, _programs(config))
    reservations: dict[str, Reservation | None] = {
        STATIC: lambda tokens: workload.longest,
        STATIC_PAGED: lambda tokens: _whole(tokens, config.block_size),
        CONTINUOUS: None,
    }
    system = point["system"]
    served, samples = serve(engine, workload.arrivals, reservations[system], in_batches=system != CONTINUOUS)
    seconds, stats = max(each.end_s for each in served), engine.stats()
    used = float(np.average([each.used for each in samples], weights=np.diff([0.0, *(each.at_s for each in samples)])))
    return {
        "requests": len(served),
        "prompt_tokens": sum(len(each.prompt) for each in workload.arrivals),
        "output_tokens": stats.tokens,
        "seconds": seconds,
        "tokens_per_s": stats.tokens / seconds,
        "batches": len({each.start_s for each in served}) if system != CONTINUOUS else None,
        "mean_running": sum(each.end_s - each.first_s for each in served) / seconds,
        "memory_use_percent": 100 * used / (config.static_batch * workload.longest),
        "mean_first_token_s": statistics.fmean(each.first_s for each in served),
        "mean_latency_s": statistics.fmean(each.end_s for each in served),
        "passes": stats.passes,
        "preemptions": stats.preemptions,
        "scale": workload.scale,
        "longest_tokens": workload.longest,
    }


def run_workload(config: "EngineBench") -> float:
    """Seconds that continuous batching takes for all requests."""
    served, _ = serve(_engine(config, _programs(config)), make_workload(config).arrivals, None)
    return max(each.end_s for each in served)
