"""The report of `engine_bench`."""

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from experiments import plot
from experiments.engine_throughput import CONTINUOUS, STATIC, STATIC_PAGED, SYSTEMS
from experiments.engine_waits import ONE_BY_ONE, TOGETHER
from experiments.experiment import Part, Picture, Row, Table

if TYPE_CHECKING:
    from experiments.engine_bench import EngineBench

__all__ = ["report"]

_THROUGHPUT, _FIRST_TOKEN, _HOST_PERCENT, _INDEX_SPEED, _PEER = 2.0, 0.2, 5.0, 5e6, 1.3
"""The goals."""


def _goal(met: bool, text: str) -> str:
    return f"The goal was {text}: {'met' if met else '**not met**'}."


def report(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    """What the runs showed, a section a kind of row; a kind that has no rows yet is left out."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["row"], []).append(row)
    yield (
        f"A decoder of the sizes of {config.model} ({config.dtype}) with random weights, blocks of {config.block_size} tokens; medians of "
        f"{config.repeats} runs. Report written on {platform.machine()} with {os.cpu_count()} cores, jax {jax.__version__}, "
        f"{jax.default_backend()}."
    )
    sections = {"throughput": _throughput, "peer": _peer, "prefix": _prefix, "host": _host, "index": _index, "speculation": _speculation}
    for kind, section in sections.items():
        if kind in by_kind:
            yield from section(config, by_kind[kind])
    if {"throughput", "prefix"} <= by_kind.keys():
        yield Picture(
            "engine",
            "Left: tokens a second from the same KV memory, medians. Right: how long each user of one prefix waits for the first token.",
            _figure(by_kind["throughput"], by_kind["prefix"]),
        )


def _ratios(rows: Sequence[Row], system: str) -> list[float]:
    """Continuous batching's tokens a second against a system's, repeat by repeat, sorted."""
    speeds = {(row["system"], row["repeat"]): row["tokens_per_s"] for row in rows}
    repeats = {repeat for _, repeat in speeds}
    return sorted(
        speeds[CONTINUOUS, each] / speeds[system, each] for each in repeats if {(CONTINUOUS, each), (system, each)} <= speeds.keys()
    )


def _throughput(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    first = rows[0]
    memory = config.static_batch * first["longest_tokens"]
    divided = f", all lengths divided by {first['scale']:.3g} so that the longest fits" if first["scale"] > 1 else ""
    yield (
        f"{first['requests']} requests ({config.lengths}{divided}), {first['prompt_tokens']:,} prompt and {first['output_tokens']:,} "
        f"output tokens, all there at the beginning. The KV memory holds {memory:,} tokens: {config.static_batch} requests at a time where "
        f"each reserves the {first['longest_tokens']} tokens of the longest."
    )
    if ratios := _ratios(rows, STATIC):
        ratio = statistics.median(ratios)
        yield (
            f"Continuous batching makes **{ratio:.2f} times** ({ratios[0]:.2f} to {ratios[-1]:.2f}) the tokens a second of static batching "
            f"from the same KV memory. {_goal(ratio >= _THROUGHPUT, f'at least {_THROUGHPUT:g} times')}"
        )
    if ratios := _ratios(rows, STATIC_PAGED):
        yield (
            f"Where static batching is paged too, and told how long the outputs will be, it makes {statistics.median(ratios):.2f} times "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) as many."
        )
    columns = ("seconds", "tokens_per_s", "batches", "mean_running", "memory_use_percent", "mean_first_token_s", "mean_latency_s", "passes")
    table = []
    for system in SYSTEMS:
        if chosen := [row for row in rows if row["system"] == system]:
            medians = {key: None if chosen[0][key] is None else statistics.median(row[key] for row in chosen) for key in columns}
            table.append({"system": system, **medians})
    yield Table(table, ("system", *columns))


def _peer(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    (row,) = rows
    yield (
        f"Against transformers' continuous batching on the same requests, with as many blocks of the same size ({row['peer']}): "
        f"**{row['speedup']:.2f} times** its tokens a second ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}), "
        f"{row['jaxpage_tokens_per_s']:.0f} and {row['transformers_tokens_per_s']:.0f}. "
        f"{_goal(row['speedup'] >= _PEER, f'at least {_PEER:g} times')}"
    )


def _prefix(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    chosen = {row["index"]: row for row in rows if row["arrival"] == ONE_BY_ONE and row["index"] != "none"}
    if chosen:
        said = "; ".join(
            f"index {index}: **{row['ratio']:.3f}** of what the first waits ({row['others_ms']:.0f} ms of {row['first_user_ms']:.0f} ms; "
            f"the slowest {row['slowest_ratio']:.3f})"
            for index, row in chosen.items()
        )
        met = max(row["ratio"] for row in chosen.values()) <= _FIRST_TOKEN
        yield (
            f"{config.users} users of one prefix of {config.prefix_tokens} tokens, each with {config.own_tokens} of their own, who come "
            f"one by one while those before decode. From the second on they wait for the first token, {said}. "
            f"{_goal(met, f'at most {_FIRST_TOKEN:g}')}"
        )
    together = {row["index"]: row for row in rows if row["arrival"] == TOGETHER}
    if {"none", "radix"} <= together.keys():
        yield (
            f"Where all others come together after the first, one pass computes the tokens of all of them: they wait "
            f"{together['radix']['ratio']:.3f} of what the first waits; without an index {together['none']['ratio']:.2f}."
        )
    yield Table(rows, ("arrival", "index", "first_user_ms", "others_ms", "slowest_ms", "ratio", "slowest_ratio", "hit_tokens"))


def _host(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    (row,) = rows
    yield (
        f"{row['seqs']} sequences decode {row['new_tokens']} tokens each: the engine's own work on the host takes "
        f"**{row['host_percent']:.2f} %** of the time ({row['host_ms_a_pass']:.2f} ms a pass). "
        f"{_goal(row['host_percent'] <= _HOST_PERCENT, f'at most {_HOST_PERCENT:g} %')} It is the time in `step` that was not spent "
        "waiting for the device (`host_seconds` of the engine's statistics). On a CPU the device computes on the same cores, so it "
        f"includes time in which the host had no core; the processor time of the host's thread is {row['thread_percent']:.2f} %."
    )
    yield Table(
        rows, ("seconds", "tokens_per_s", "passes", "host_seconds", "wait_seconds", "host_percent", "thread_percent", "host_ms_a_pass")
    )


def _index(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    slowest = min(min(row["insert_tokens_per_s"], row["match_tokens_per_s"]) for row in rows)
    said = "; ".join(
        f"{row['index']} inserts **{row['insert_tokens_per_s'] / 1e6:.1f}** and matches **{row['match_tokens_per_s'] / 1e6:.1f}** million "
        "tokens a second"
        for row in rows
    )
    yield (
        f"A prompt of {config.index_tokens:,} tokens in blocks of {config.block_size}: {said}. "
        f"{_goal(slowest >= _INDEX_SPEED, f'at least {_INDEX_SPEED / 1e6:g} million each')}"
    )
    yield Table(rows, ("index", "tokens", "insert_ms", "match_ms", "insert_tokens_per_s", "match_tokens_per_s"))


def _speculation(config: "EngineBench", rows: Sequence[Row]) -> Iterator[Part]:
    for row in rows:
        if "left_out" in row:
            yield f"Drafts at batch {row['batch']} were not measured: {row['left_out']}"
    measured = [row for row in rows if "left_out" not in row]
    for row in measured:
        same = "the same tokens" if row["same_tokens"] else "other tokens, as rounding differs between one row and several"
        yield (
            f"Prompt lookup on repetitive text ({config.speculation}, {config.dtype}, batch {row['batch']}): **{row['speedup']:.2f} "
            f"times** the tokens a second of plain decoding, {row['kept_per_step']:.2f} drafts kept a step; {same}."
        )
    if measured:
        columns = ("plain_tokens_per_s", "lookup_tokens_per_s", "speedup", "kept_percent", "kept_per_step", "same_tokens")
        yield Table(measured, ("batch", "new_tokens", "num_drafts", *columns))


def _figure(throughput: Sequence[Row], prefix: Sequence[Row]) -> Any:
    figure, (left, right) = plot.grid(1, 2, width=4.4, height=2.6)
    speeds = {
        system: statistics.median(speeds)
        for system in SYSTEMS
        if (speeds := [row["tokens_per_s"] for row in throughput if row["system"] == system])
    }
    plot.bars(left, list(speeds), list(speeds.values()), [f"{speed:.0f}" for speed in speeds.values()], plot.COLOURS[: len(speeds)])
    left.set(xlabel="output tokens a second", xlim=(0, 1.2 * max(speeds.values())))
    series = {
        "no sharing" if row["index"] == "none" else row["index"]: (list(range(1, row["users"] + 1)), row["waits_ms"])
        for row in prefix
        if row["arrival"] == ONE_BY_ONE
    }
    plot.lines(right, series, xlabel="user", ylabel="until the first token, ms", ylim=(0, None))
    return figure
