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
from typing import Any, Literal

import numpy as np

from experiments import plot
from experiments.block_sizes import check_block_sizes
from experiments.decode_step import decoder
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.lengths import check_source, load_lengths
from experiments.serving import Arrival, Reservation, Sample, poisson, serve
from jaxpage import SamplingParams
from jaxpage.engine import Engine, EngineOptions
from jaxpage.programs import Programs
from jaxpage.sampler_arrays import Features

__all__ = ["EXPERIMENT", "PagedVsContiguous"]

_PAGED, _MAXIMUM = "paged", "maximum"
_SYSTEMS = (_MAXIMUM, "power of two", "foresight", _PAGED)
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
            for system in _SYSTEMS:  # side by side in time, so that a slow hour slows them all
                yield {"system": system, "rate_per_s": rate, "repeat": repeat}


def _reservation(config: PagedVsContiguous, system: str) -> Reservation | None:
    """What a system reserves for a request, in whole blocks, because the pool that all run on has no others."""

    def whole(tokens: int) -> int:
        return min(-(-tokens // config.block_size) * config.block_size, config.max_length)

    reservations: dict[str, Reservation | None] = {
        _MAXIMUM: lambda tokens: config.max_length,
        "power of two": lambda tokens: whole(1 << (tokens - 1).bit_length()),
        "foresight": whole,
        _PAGED: None,
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


_MEASURES = (
    "memory_use_percent",
    "budget_use_percent",
    "tokens_per_s",
    "tokens_per_processor_s",
    "requests_per_s",
    "mean_latency_s",
    "p95_latency_s",
    "mean_first_token_s",
    "preemptions",
)
_GOALS = "memory use from about 30 % to at least 96 %, throughput at least 2.4 times, p95 latency at least 2.3 times lower"


def _report(config: PagedVsContiguous, rows: Sequence[Row]) -> Iterator[Part]:
    summary = [_summary(config, rows, system, rate) for rate in config.rates_per_s for system in _SYSTEMS]
    summary = [row for row in summary if row]
    yield (
        f"{config.requests} requests ({config.lengths}) a run, a KV memory of {config.budget_tokens:,} tokens, a decoder of the sizes of "
        f"{config.model} ({config.dtype}) with random weights; medians of {config.repeats} runs with seeds of their own."
    )
    yield from _verdict(config, rows)
    yield (
        "Memory use: tokens held of places reserved, over time. Budget use: tokens held of the whole memory. A rate of 0 lets all requests "
        "arrive at once. Tokens per processor second depend little on what else the machine does; times do."
    )
    yield Table(summary, ("rate_per_s", "system", *_MEASURES))
    yield Picture(
        "rates", "Throughput, latency and first tokens against the request rate; bars span the runs.", _rates_figure(config, rows)
    )
    yield Picture("memory", "Tokens in the KV memory over time, at the highest rate.", _memory_figure(config, rows))


def _chosen(rows: Sequence[Row], system: str, rate: float) -> list[Row]:
    return [row for row in rows if row["system"] == system and row["rate_per_s"] == rate]


def _summary(config: PagedVsContiguous, rows: Sequence[Row], system: str, rate: float) -> Row:
    chosen = _chosen(rows, system, rate)
    if not chosen:
        return {}
    return {"rate_per_s": rate, "system": system, **{key: statistics.median(row[key] for row in chosen) for key in _MEASURES}}


def _verdict(config: PagedVsContiguous, rows: Sequence[Row]) -> Iterator[Part]:
    """Paging against reservation at the maximum, run by run, at the rate at which it gains most."""
    pairs = [
        (
            rate,
            [
                (one, other)
                for one in _chosen(rows, _MAXIMUM, rate)
                for other in _chosen(rows, _PAGED, rate)
                if one["repeat"] == other["repeat"]
            ],
        )
        for rate in config.rates_per_s
    ]
    pairs = [(rate, each) for rate, each in pairs if each]
    if not pairs:
        return
    parts = []
    for name, key, turned in (
        ("throughput is", "tokens_per_s", False),
        ("tokens per processor second are", "tokens_per_processor_s", False),
        ("p95 latency is lower by", "p95_latency_s", True),
    ):
        ratios = {rate: sorted(a[key] / b[key] if turned else b[key] / a[key] for a, b in each) for rate, each in pairs}
        rate = max(ratios, key=lambda rate: statistics.median(ratios[rate]))
        best, where = ratios[rate], f"at {rate:g} requests a second" if rate else "with all requests at once"
        parts.append(f"{name} **{statistics.median(best):.2f} times** ({best[0]:.2f} to {best[-1]:.2f}) {where}")
    uses = [[row["memory_use_percent"] for _, each in pairs for row in [pair[place] for pair in each]] for place in (0, 1)]
    parts.append(f"memory use goes from **{statistics.median(uses[0]):.1f} %** to **{statistics.median(uses[1]):.1f} %**")
    yield f"Paging against reservation of the maximum, each at the rate at which it gains most: {'; '.join(parts)}. The goal was: {_GOALS}."


def _rates_figure(config: PagedVsContiguous, rows: Sequence[Row]) -> Any:
    panels = {"tokens_per_s": "tokens a second", "p95_latency_s": "latency, p95, s", "mean_first_token_s": "first token, mean, s"}
    figure, axes = plot.grid(1, len(panels), width=3.3, height=2.8)
    rates = [rate for rate in config.rates_per_s if rate] or list(config.rates_per_s)
    for ax, (column, label) in zip(axes, panels.items(), strict=True):
        plot.log_ticks(ax, rates)
        series = {}
        for system, colour in zip(_SYSTEMS, plot.COLOURS, strict=False):
            spans = [(rate, sorted(row[column] for row in _chosen(rows, system, rate))) for rate in rates]
            spans = [(rate, values) for rate, values in spans if values]
            series[system] = ([rate for rate, _ in spans], [statistics.median(values) for _, values in spans])
            ax.vlines(
                series[system][0],
                [values[0] for _, values in spans],
                [values[-1] for _, values in spans],
                color=colour,
                linewidth=2,
                alpha=0.5,
            )
        if column != "tokens_per_s":
            plot.log_heights(ax)
        limits = {"ylim": (0, None)} if column == "tokens_per_s" else {}
        plot.lines(ax, series, xlabel="requests a second", ylabel=label, **limits)
    return figure


def _memory_figure(config: PagedVsContiguous, rows: Sequence[Row]) -> Any:
    figure, axes = plot.grid(len(_SYSTEMS), 1, width=5.6, height=1.35)
    rate = min(config.rates_per_s, key=lambda each: (each != 0, -each))
    end = max(row["timeline"][-1][0] for row in rows if row["rate_per_s"] == rate)
    for ax, system, colour in zip(axes, _SYSTEMS, plot.COLOURS, strict=False):
        for row in _chosen(rows, system, rate)[:1]:
            times, used = zip(*row["timeline"], strict=True)
            ax.fill_between(times, used, color=colour, alpha=0.8, linewidth=0)
            ax.text(0.99, 0.86, f"{system}: {row['budget_use_percent']:.0f} % in the mean", transform=ax.transAxes, ha="right", fontsize=8)
        ax.set(ylim=(0, 120), yticks=(0, 50, 100), xlim=(0, end), ylabel="memory, %")
    axes[-1].set_xlabel("seconds")
    return figure


_QUICK = PagedVsContiguous(requests=40, rates_per_s=(2.0, 8.0, 0.0), repeats=1, budget_tokens=2048, max_seqs=32)

EXPERIMENT = Experiment(PagedVsContiguous, _QUICK, _points, _measure, _report)
