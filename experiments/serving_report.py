"""The report of `paged_vs_contiguous`."""

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from experiments import plot
from experiments.experiment import Part, Picture, Row, Table

if TYPE_CHECKING:
    from experiments.paged_vs_contiguous import PagedVsContiguous

__all__ = ["MAXIMUM", "PAGED", "SYSTEMS", "report"]

PAGED, MAXIMUM = "paged", "maximum"
SYSTEMS = (MAXIMUM, "power of two", "foresight", PAGED)
"""What is compared: by what a system reserves."""

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


def report(config: "PagedVsContiguous", rows: Sequence[Row]) -> Iterator[Part]:
    """What a serving run showed."""
    summary = [_summary(config, rows, system, rate) for rate in config.rates_per_s for system in SYSTEMS]
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


def _summary(config: "PagedVsContiguous", rows: Sequence[Row], system: str, rate: float) -> Row:
    chosen = _chosen(rows, system, rate)
    if not chosen:
        return {}
    return {"rate_per_s": rate, "system": system, **{key: statistics.median(row[key] for row in chosen) for key in _MEASURES}}


def _verdict(config: "PagedVsContiguous", rows: Sequence[Row]) -> Iterator[Part]:
    """Paging against reservation at the maximum, run by run, at the rate at which it gains most."""
    pairs = [
        (
            rate,
            [
                (one, other)
                for one in _chosen(rows, MAXIMUM, rate)
                for other in _chosen(rows, PAGED, rate)
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


def _rates_figure(config: "PagedVsContiguous", rows: Sequence[Row]) -> Any:
    panels = {"tokens_per_s": "tokens a second", "p95_latency_s": "latency, p95, s", "mean_first_token_s": "first token, mean, s"}
    figure, axes = plot.grid(1, len(panels), width=3.3, height=2.8)
    rates = [rate for rate in config.rates_per_s if rate] or list(config.rates_per_s)
    for ax, (column, label) in zip(axes, panels.items(), strict=True):
        plot.log_ticks(ax, rates)
        series = {}
        for system, colour in zip(SYSTEMS, plot.COLOURS, strict=False):
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


def _memory_figure(config: "PagedVsContiguous", rows: Sequence[Row]) -> Any:
    figure, axes = plot.grid(len(SYSTEMS), 1, width=5.6, height=1.35)
    rate = min(config.rates_per_s, key=lambda each: (each != 0, -each))
    end = max(row["timeline"][-1][0] for row in rows if row["rate_per_s"] == rate)
    for ax, system, colour in zip(axes, SYSTEMS, plot.COLOURS, strict=False):
        for row in _chosen(rows, system, rate)[:1]:
            times, used = zip(*row["timeline"], strict=True)
            ax.fill_between(times, used, color=colour, alpha=0.8, linewidth=0)
            ax.text(0.99, 0.86, f"{system}: {row['budget_use_percent']:.0f} % in the mean", transform=ax.transAxes, ha="right", fontsize=8)
        ax.set(ylim=(0, 120), yticks=(0, 50, 100), xlim=(0, end), ylabel="memory, %")
    axes[-1].set_xlabel("seconds")
    return figure
