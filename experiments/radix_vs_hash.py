"""How much of the prompts a radix tree and a hash chain find again, by block size, cache size, eviction policy and schedule.

The indexes are those of the library (`jaxpage.prefix`); requests are served one at a time. Mooncake traces carry ids of blocks of 512
tokens: there one id is one token and the block size is 1, so that one id is one block of the index.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments import plot
from experiments.block_sizes import BLOCK_SIZES, check_block_sizes
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.greeting_tree import draw_tree, greeting_tree
from experiments.replay import INDEXES, SCHEDULES, Hits, replay
from experiments.traces import FORMATS, read_trace
from experiments.workloads import WORKLOADS, make_requests, mooncake_requests
from jaxpage.prefix import POLICIES

__all__ = ["EXPERIMENT", "RadixVsHash"]

_TRACE_BLOCK = 512  # prompt tokens behind one id of a Mooncake trace


@dataclasses.dataclass(frozen=True)
class RadixVsHash:
    """Hit rates of the two prefix indexes."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """multi_turn, few_shot, tree_of_thought, self_consistency."""
    requests: int = 1000
    """Requests of each workload."""
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    """Tokens a KV block holds."""
    cache_tokens: tuple[int, ...] = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
    """Cache sizes to compare at `block_size`."""
    block_size: int = 16
    """Block size of the comparisons of cache sizes, policies and schedules."""
    tight_tokens: int = 8_000
    """Cache size of the comparisons of policies and schedules."""
    queue: int = 32
    """Requests that wait while the schedules choose."""
    traces: tuple[str, ...] = ()
    """Paths of Mooncake traces."""
    trace_blocks: tuple[int, ...] = (1_000, 5_000, 10_000, 50_000)
    """Cache sizes of the traces, in their blocks of 512 tokens; one of unlimited size comes first."""
    seed: int = 0
    """Seed of the workloads."""

    def __post_init__(self) -> None:
        check_block_sizes((*self.block_sizes, self.block_size))
        if unknown := set(self.workloads) - set(WORKLOADS):
            raise ValueError(f"workloads must be of {', '.join(WORKLOADS)}; got {', '.join(sorted(unknown))}")
        if min(self.requests, self.queue, self.tight_tokens, *self.cache_tokens, *self.trace_blocks) < 1:
            raise ValueError("requests, queue and cache sizes must be positive")
        if bad := [trace for trace in self.traces if not trace.endswith(".jsonl")]:
            raise ValueError(f"only Mooncake traces ({', '.join(FORMATS)[6:]}) have ids of prefixes; got {bad[0]}")


def _points(config: RadixVsHash) -> Iterator[Point]:
    for workload in config.workloads:
        common = {"workload": workload, "schedule": "first_come"}
        for index in INDEXES:
            for block_size in config.block_sizes:
                yield {"row": "block_size", **common, "index": index, "block_size": block_size, "cache_tokens": None, "policy": "lru"}
            for cache_tokens in config.cache_tokens:
                sizes = {"block_size": config.block_size, "cache_tokens": cache_tokens}
                yield {"row": "cache", **common, "index": index, **sizes, "policy": "lru"}
        tight = {"workload": workload, "index": "radix", "block_size": config.block_size, "cache_tokens": config.tight_tokens}
        for policy in POLICIES:
            if policy != "priority":  # these requests have none
                yield {"row": "policy", **tight, "policy": policy, "schedule": "first_come"}
        for schedule in SCHEDULES:
            yield {"row": "schedule", **tight, "policy": "lru", "schedule": schedule}
    for trace in config.traces:
        for index in INDEXES:
            for blocks in (None, *config.trace_blocks):
                yield {"row": "trace", "trace": trace, "index": index, "cache_blocks": blocks}
    yield {"row": "tree"}


def _workload_row(config: RadixVsHash, point: Point) -> Row:
    index = INDEXES[point["index"]](point["block_size"], point["policy"])
    requests = make_requests(point["workload"], config.requests, config.seed)
    capacity = None if point["cache_tokens"] is None else max(1, point["cache_tokens"] // point["block_size"])
    queue = config.queue if point["row"] == "schedule" else 1
    return _hits(replay(index, requests, capacity, schedule=SCHEDULES[point["schedule"]], queue=queue))


def _trace_row(config: RadixVsHash, point: Point) -> Row:
    requests = mooncake_requests(read_trace(point["trace"]).prefix_ids)
    return _hits(replay(INDEXES[point["index"]](1, "lru"), requests, point["cache_blocks"]))


def _hits(hits: Hits) -> Row:
    return {"hit_percent": hits.percent, "evicted_blocks": hits.evicted_blocks}


def _tree_row(config: RadixVsHash, point: Point) -> Row:
    return {"nodes": greeting_tree()}


_ROWS: dict[str, Callable[[RadixVsHash, Point], Row]] = {
    "block_size": _workload_row,
    "cache": _workload_row,
    "policy": _workload_row,
    "schedule": _workload_row,
    "trace": _trace_row,
    "tree": _tree_row,
}


def _measure(config: RadixVsHash, point: Point) -> Row:
    return _ROWS[point["row"]](config, point)


def _report(config: RadixVsHash, rows: Sequence[Row]) -> Iterator[Part]:
    by_size, by_cache, by_policy, by_schedule, by_trace, trees = ([row for row in rows if row["row"] == kind] for kind in _ROWS)
    yield (
        "Hits are the share of prompt tokens that need not be computed, of all but each prompt's last token. The radix tree matches to the "
        "token, whatever the block size, and clones the partial block at the end of a match; the hash chain finds full blocks only."
    )
    if by_size:
        yield Picture("block_size", "Hit rate against block size, in a cache without limit.", _figure(config, by_size, "block_size"))
        yield Table(_wide(by_size, "block_size"), ("workload", "index", *map(str, config.block_sizes)))
        yield f"Against the size of the cache, with blocks of {config.block_size} tokens and eviction of the least recently used:"
        yield Picture("cache", "Hit rate against the size of the cache.", _figure(config, by_cache, "cache_tokens"))
        yield Table(_wide(by_cache, "cache_tokens"), ("workload", "index", *map(str, config.cache_tokens)))
        yield f"Eviction policies, in a radix tree of {config.tight_tokens:,} tokens:"
        yield Table(_wide(by_policy, "policy"), ("workload", *dict.fromkeys(row["policy"] for row in by_policy)))
        yield f"Schedules, in the same tree, with {config.queue} requests waiting: the first that came, or the longest prefix that is held:"
        yield Table(_wide(by_schedule, "schedule"), ("workload", *SCHEDULES))
    if by_trace:
        yield f"Mooncake traces: blocks of {_TRACE_BLOCK} tokens, each of which is one block of the index:"
        yield Picture("traces", "Hit rate of the Mooncake traces against the size of the cache.", _trace_figure(by_trace))
        yield Table(by_trace, ("trace", "index", "cache_blocks", "hit_percent", "evicted_blocks"))
    for row in trees:
        yield "Three greetings in a radix tree, which splits where they part:"
        yield Picture("tree", "Three greetings in a radix tree; one token is one character, one node one box.", draw_tree(row["nodes"]))


def _wide(rows: Sequence[Row], column: str) -> list[Row]:
    """One row a workload and index, with a column for each value of `column`."""
    wide: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["workload"], row["index"])
        wide.setdefault(key, {"workload": key[0], "index": key[1]})[str(row[column])] = row["hit_percent"]
    return list(wide.values())


def _figure(config: RadixVsHash, rows: Sequence[Row], column: str) -> Any:
    count = len(config.workloads)
    figure, axes = plot.grid(-(-count // 2), min(2, count), width=3.6, height=2.5)
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax, workload in zip(axes, config.workloads, strict=False):
        series = {}
        for index in INDEXES:
            chosen = [row for row in rows if row["workload"] == workload and row["index"] == index]
            series[index] = ([row[column] for row in chosen], [row["hit_percent"] for row in chosen])
        _axis(ax, series, workload.replace("_", " "), {"block_size": "tokens a block", "cache_tokens": "tokens in the cache"}[column])
    return figure


def _axis(ax: Any, series: dict[str, tuple[list[float], list[float]]], title: str, label: str) -> None:
    plot.log_ticks(ax, [x for xs, _ in series.values() for x in xs])
    plot.title(ax, title)
    top = 103 if max(max(ys) for _, ys in series.values()) > 70 else None
    plot.lines(ax, series, xlabel=label, ylabel="hits, %", ylim=(0, top))


def _trace_figure(rows: Sequence[Row]) -> Any:
    figure, (ax,) = plot.grid(width=5.6)
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["index"] == "hash" and row["cache_blocks"] is not None:
            x, y = series.setdefault(row["trace"].rpartition("/")[2], ([], []))
            x.append(row["cache_blocks"])
            y.append(row["hit_percent"])
    _axis(ax, series, "both indexes find the same", "blocks of 512 tokens in the cache")
    return figure


_QUICK = RadixVsHash(requests=300, cache_tokens=(1_000, 4_000, 16_000, 64_000))

EXPERIMENT = Experiment(RadixVsHash, _QUICK, _points, _measure, _report)
