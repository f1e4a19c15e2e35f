"""Which block size suits which lengths: memory lost in last blocks, table entries, allocations, time of a decode step, and prefix hits.

Memory is counted in the real pool, hits in the real index, and times are measured in pairs against blocks of 16 tokens.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from experiments import plot
from experiments.attention_step import attention_stepper
from experiments.block_sizes import check_block_sizes
from experiments.decode_step import Batch, start, stepper
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.lengths import check_source, load_lengths
from experiments.measure import paired
from experiments.memory import hold
from experiments.replay import replay
from experiments.workloads import make_requests
from jaxpage.prefix import HashIndex

__all__ = ["EXPERIMENT", "BlockSize", "choose"]

_BASE = 16  # the block size that times are compared with
_CLASSIC = (1, 8, 16, 64)
_ENTRY_BYTES = 4  # a table entry is an int32
_TIE = 0.01  # scores closer than this are equal: the times are not better than that


@dataclasses.dataclass(frozen=True)
class BlockSize:
    """Block sizes over distributions of lengths."""

    block_sizes: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    """Tokens a KV block holds."""
    lengths: tuple[str, ...] = ("short_chat", "long_chat", "code")
    """Distributions (short_chat, long_chat, code, five_users), or paths of traces."""
    requests: int = 2000
    """Requests to draw from each distribution."""
    hit_requests: int = 1000
    """Chat turns over which prefix hits are counted."""
    model: Literal["tiny", "smollm2-135m"] = "tiny"
    """Whose sizes the timed decoder has; its weights are random."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the timed weights and cache."""
    batch: int = 8
    """Sequences of a timed step."""
    context: int = 1024
    """Tokens each of them holds."""
    steps: int = 8
    """Decode steps of one timed run."""
    pairs: int = 7
    """Runs of each side of a comparison; 0 leaves the times out."""
    seed: int = 0
    """Seed of lengths, prompts, weights and block order."""

    def __post_init__(self) -> None:
        check_block_sizes(self.block_sizes)
        for source in self.lengths:
            check_source(source)
        if min(self.requests, self.hit_requests, self.batch, self.context, self.steps) < 1 or self.pairs < 0:
            raise ValueError("requests, hit_requests, batch, context and steps must be positive, and pairs not negative")


def _points(config: BlockSize) -> Iterator[Point]:
    for source in config.lengths:
        for block_size in config.block_sizes:
            yield {"row": "memory", "lengths": source, "block_size": block_size}
    for block_size in config.block_sizes:
        yield {"row": "hits", "block_size": block_size}
        if config.pairs:
            yield {"row": "time", "block_size": block_size}


def _memory_row(config: BlockSize, point: Point) -> Row:
    lengths = load_lengths(point["lengths"], config.requests, config.seed)
    prompts, final = hold([lengths.prompt, lengths.total], point["block_size"])
    seqs = len(lengths.total)
    return {
        "requests": seqs,
        "mean_tokens": final.tokens / seqs,
        "waste_percent": final.waste_percent,
        "entries_per_request": final.blocks / seqs,
        "table_bytes_per_request": _ENTRY_BYTES * final.blocks / seqs,
        "allocations_per_token": (final.blocks - prompts.blocks) / (final.tokens - prompts.tokens),
        # A step reads an entry for each block of its context, which grows evenly from the prompt to the end.
        "lookups_per_step": (prompts.blocks + final.blocks) / 2 / seqs,
    }


def _hits_row(config: BlockSize, point: Point) -> Row:
    requests = make_requests("multi_turn", config.hit_requests, config.seed)
    return {"hit_percent": replay(HashIndex(point["block_size"]), requests, None).percent}


def _time_row(config: BlockSize, point: Point) -> Row:
    batch = Batch(config.model, config.dtype, config.batch, config.context, config.steps, config.seed)
    size = point["block_size"]
    _, attention, attention_ratios = paired(attention_stepper(batch, _BASE), attention_stepper(batch, size), config.pairs)
    base, this = (stepper(batch, start(batch, each), "xla") for each in (_BASE, size))
    _, step, step_ratios = paired(base, this, config.pairs)
    return {
        "attention_ms": attention * 1e3,
        "attention_ratio": statistics.median(attention_ratios),
        "step_ms": step * 1e3,
        "step_ratio": statistics.median(step_ratios),
        "step_ratio_low": step_ratios[len(step_ratios) // 4],
        "step_ratio_high": step_ratios[-1 - len(step_ratios) // 4],
    }


_ROWS: dict[str, Callable[[BlockSize, Point], Row]] = {"memory": _memory_row, "hits": _hits_row, "time": _time_row}


def _measure(config: BlockSize, point: Point) -> Row:
    return _ROWS[point["row"]](config, point)


def choose(rows: Sequence[Row]) -> Row:
    """The row with the best score: sequences that fit in a pool, times steps a second, against no waste and blocks of 16 tokens.

    A step time that the quartiles of the pairs do not tell from that of blocks of 16 counts as equal. Scores within a percent of the best
    are equal too, and of those the largest block wins: it has the fewest entries and allocations.
    """
    best = max(_score(row) for row in rows)
    return max((row for row in rows if _score(row) >= best * (1 - _TIE)), key=lambda row: row["block_size"])


def _score(row: Row) -> float:
    return (1 - row["waste_percent"] / 100) / (row["step_ratio"] if _differs(row) else 1.0)


def _differs(row: Row) -> bool:
    """Whether the step time is known to differ: half of the pairs at least say the same."""
    return "step_ratio" in row and not row["step_ratio_low"] <= 1 <= row["step_ratio_high"]


def _report(config: BlockSize, rows: Sequence[Row]) -> Iterator[Part]:
    memory, hits, times = ([row for row in rows if row["row"] == kind] for kind in _ROWS)
    found = {row["block_size"]: row for row in hits}
    timed = {row["block_size"]: row for row in times}
    joined = [{**timed.get(row["block_size"], {}), **found.get(row["block_size"], {}), **row} for row in memory]
    by_lengths = {source: [row for row in joined if row["lengths"] == source] for source in config.lengths}
    yield (
        "The choice: most sequences in a pool times steps a second. Times are against blocks of 16; of sizes within a percent the largest "
        "is taken, which has the fewest table entries and allocations."
    )
    for source, each in by_lengths.items():
        if each:
            yield _advice(source, each)
    classic = [row for row in by_lengths.get("short_chat", []) if row["block_size"] in _CLASSIC]
    if classic:
        yield f"The classic table, short chats of {classic[0]['mean_tokens']:.0f} tokens in the mean:"
        yield Table(classic, ("block_size", "waste_percent", "entries_per_request", "allocations_per_token"))
    yield Picture("waste", "Slots of last blocks that hold no token, by block size and lengths.", _waste_figure(by_lengths))
    counts = ("waste_percent", "entries_per_request", "table_bytes_per_request", "allocations_per_token", "lookups_per_step")
    yield Table(memory, ("lengths", "block_size", *counts))
    yield "Prefix hits of chats in a hash index without limit, which finds full blocks only:"
    yield Table(hits, ("block_size", "hit_percent"))
    if times:
        yield (
            f"Times on a decoder of the sizes of {config.model} ({config.dtype}), {config.batch} sequences of {config.context} tokens, "
            f"medians of {config.pairs} pairs; ratios are against blocks of {_BASE}:"
        )
        ratios = ("attention_ratio", "step_ms", "step_ratio", "step_ratio_low", "step_ratio_high")
        yield Table(times, ("block_size", "attention_ms", *ratios))
        yield Picture("time", f"Time of one layer's attention and of a whole decode step, against blocks of {_BASE}.", _time_figure(times))


def _advice(source: str, rows: Sequence[Row]) -> str:
    chosen = choose(rows)
    others = {row["block_size"]: row for row in rows}
    sizes = sorted(others)
    place = sizes.index(chosen["block_size"])
    reasons = [f"it wastes {chosen['waste_percent']:.2g} % of the slots it reserves" + _speed(chosen)]
    if place > 0:
        smaller = others[sizes[place - 1]]
        gain = chosen["waste_percent"] - smaller["waste_percent"]
        reasons.append(f"{smaller['block_size']} would save {gain:.2g} points of memory" + _speed(smaller))
    if place + 1 < len(sizes):
        larger = others[sizes[place + 1]]
        loss = larger["waste_percent"] - chosen["waste_percent"]
        reasons.append(f"{larger['block_size']} would waste {loss:.2g} points more" + _speed(larger))
    return f"**{source}: blocks of {chosen['block_size']}**: {'; '.join(reasons)}."


def _speed(row: Row) -> str:
    if "step_ratio" not in row or row["block_size"] == _BASE:
        return ""
    return f", with steps of {row['step_ratio']:.2f} times the length" + ("" if _differs(row) else " (within the noise)")


def _waste_figure(by_lengths: dict[str, list[Row]]) -> Any:
    figure, (ax,) = plot.grid(width=5.6)
    series = {
        source.rpartition("/")[2]: ([row["block_size"] for row in rows], [row["waste_percent"] for row in rows])
        for source, rows in by_lengths.items()
        if rows
    }
    plot.log_ticks(ax, [row["block_size"] for rows in by_lengths.values() for row in rows])
    plot.lines(ax, series, xlabel="tokens a block", ylabel="reserved slots without a token, %", ylim=(0, None))
    return figure


def _time_figure(rows: Sequence[Row]) -> Any:
    figure, (ax,) = plot.grid(width=5.6)
    sizes = [row["block_size"] for row in rows]
    plot.log_ticks(ax, sizes)
    ax.axhline(1, color="black", linewidth=0.8)
    series = {"attention": (sizes, [row["attention_ratio"] for row in rows]), "decode step": (sizes, [row["step_ratio"] for row in rows])}
    plot.lines(ax, series, xlabel="tokens a block", ylabel=f"time / time with blocks of {_BASE}", ylim=(0, None))
    return figure


_QUICK = BlockSize(requests=500, hit_requests=300, context=512, pairs=5)

EXPERIMENT = Experiment(BlockSize, _QUICK, _points, _measure, _report)
