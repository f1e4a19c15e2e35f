"""Decode speed: the paged cache against a contiguous one, and against transformers.

Both caches run the same decoder and the same loop. Cache contents are random: a step's time does not depend on them, and a prefill of
32 x 1024 tokens would take longer than all that is measured. Blocks are handed out in shuffled order. Figures are medians; each ratio is
the median of the ratios of pairs that ran one after the other.
"""

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxpage
from experiments import plot
from experiments.decode_step import Batch, decoder, start, stepper
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.measure import paired
from experiments.peer import transformers_process, transformers_row

__all__ = ["EXPERIMENT", "DecodeBench"]


@dataclasses.dataclass(frozen=True)
class DecodeBench:
    """Decode step times of the paged cache against a contiguous one, on a decoder with random weights."""

    model: Literal["smollm2-135m", "tiny"] = "smollm2-135m"
    """Whose sizes the decoder has."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Dtypes of weights and cache."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Sequences decoded at a time."""
    contexts: tuple[int, ...] = (128, 1024)
    """Tokens each sequence holds before the first step."""
    block_size: int = 16
    """Tokens a KV block holds."""
    steps: int = 8
    """Decode steps of one run."""
    pairs: int = 7
    """Runs of each side."""
    allocation_seqs: int = 256
    """Sequences of the allocation row; 0 leaves it out."""
    peer: Literal["none", "transformers"] = "none"
    """Also measure transformers' model.generate on the same work."""
    peer_python: str = "python3"
    """The Python that has torch and transformers."""
    peer_batches: tuple[int, ...] = (8, 32)
    """Batches of the peer rows: prompts of 128 tokens, 32 new ones each."""
    seed: int = 0
    """Seed of weights, cache contents and block order."""

    def __post_init__(self) -> None:
        for name in ("dtypes", "batches", "contexts", "block_size", "steps", "pairs"):
            value = getattr(self, name)
            if not value or (name != "dtypes" and min(value if isinstance(value, tuple) else (value,)) < 1):
                raise ValueError(f"{name} must be positive and not empty, got {value!r}")
        if unknown := set(self.dtypes) - {"float32", "bfloat16"}:
            raise ValueError(f"dtypes must be float32 or bfloat16, got {', '.join(unknown)}")


def _points(config: DecodeBench) -> Iterator[Point]:
    for dtype in config.dtypes:
        for batch in config.batches:
            for context in config.contexts:
                yield {"row": "step", "dtype": dtype, "batch": batch, "context": context}
        if config.allocation_seqs and dtype == config.dtypes[0]:
            yield {"row": "allocation", "dtype": dtype, "batch": config.allocation_seqs, "context": config.contexts[0]}
        if config.peer == "transformers":
            for batch in config.peer_batches:
                yield {"row": "peer", "dtype": dtype, "batch": batch}


def _batch(config: DecodeBench, point: Point) -> Batch:
    return Batch(config.model, point["dtype"], point["batch"], point["context"], config.steps, config.seed)


def _step_row(config: DecodeBench, point: Point) -> Row:
    batch = _batch(config, point)
    contiguous = stepper(batch, start(batch, None), "contiguous")
    paged = stepper(batch, start(batch, config.block_size), "xla")
    dense, ours, ratios = paired(contiguous, paged, config.pairs)
    return {
        "contiguous_step_ms": dense * 1e3,
        "paged_step_ms": ours * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }


def _allocation_row(config: DecodeBench, point: Point) -> Row:
    """Block allocation alone, against whole steps that contain it."""
    batch = _batch(config, point)
    state = start(batch, config.block_size)

    def grow(cache: jaxpage.KVCache) -> jaxpage.KVCache:
        def step(_: Any, cache: jaxpage.KVCache) -> jaxpage.KVCache:
            return jaxpage.reserve(cache, cache.table.lengths + 1, max_new_blocks=1)[0]

        return jax.lax.fori_loop(0, config.steps, step, cache)

    grow_all = jax.jit(grow, donate_argnums=0)
    rewind = jax.jit(lambda cache: jaxpage.truncate(cache, jnp.full_like(cache.table.lengths, batch.context)), donate_argnums=0)
    held = [state.cache]

    def measure() -> float:
        held[0] = jax.block_until_ready(rewind(held[0]))
        begin = time.perf_counter()
        held[0] = jax.block_until_ready(grow_all(held[0]))
        return (time.perf_counter() - begin) / config.steps

    measure()
    allocation = statistics.median(measure() for _ in range(config.pairs))
    whole = stepper(batch, state._replace(cache=held[0]), "xla")
    whole()
    step = statistics.median(whole() for _ in range(3))
    return {"allocation_ms": allocation * 1e3, "step_ms": step * 1e3, "share_percent": 100 * allocation / step}


def _peer_row(config: DecodeBench, point: Point) -> Row:
    model = decoder(config.model, point["dtype"], config.seed)
    with transformers_process(config.peer_python) as peer:
        return transformers_row(
            model, point["dtype"], point["batch"], peer, block_size=config.block_size, pairs=max(3, config.pairs // 3), seed=config.seed
        )


_ROWS: dict[str, Callable[[DecodeBench, Point], Row]] = {"step": _step_row, "allocation": _allocation_row, "peer": _peer_row}


def _measure(config: DecodeBench, point: Point) -> Row:
    return _ROWS[point["row"]](config, point)


def _report(config: DecodeBench, rows: Sequence[Row]) -> Iterator[Part]:
    steps, allocation, peer = ([row for row in rows if row["row"] == kind] for kind in _ROWS)
    yield (
        f"A decoder of the sizes of {config.model} with random weights, blocks of {config.block_size} tokens; medians of {config.pairs} "
        f"pairs of runs, and the quartiles of the pairs' ratios. Report written on {platform.machine()} with {os.cpu_count()} cores, jax "
        f"{jax.__version__}, {jax.default_backend()}."
    )
    yield Table(steps, ("dtype", "batch", "context", "contiguous_step_ms", "paged_step_ms", "ratio", "ratio_low", "ratio_high"))
    yield Picture("ratio", "Time of a decode step from the paged cache, against the same step from a contiguous one.", _figure(steps))
    if allocation:
        yield "Block allocation, as a part of the decode step:"
        yield Table(allocation, ("dtype", "batch", "context", "allocation_ms", "step_ms", "share_percent"))
    if peer:
        yield "Whole generations, prompts included, against transformers:"
        yield Table(
            peer, ("dtype", "batch", "prompt_tokens", "new_tokens", "transformers_tokens_per_s", "jaxpage_tokens_per_s", "speedup", "peer")
        )


def _figure(rows: Sequence[Row]) -> Any:
    figure, (ax,) = plot.grid(width=6.4, height=0.3 * len(rows) + 0.8)
    names = [f"{row['dtype']}, batch {row['batch']}, context {row['context']}" for row in rows]
    texts = [f"{row['ratio']:.2f} x  ({row['paged_step_ms']:.3g} ms)" for row in rows]
    plot.bars(ax, names, [row["ratio"] for row in rows], texts, [plot.COLOURS[0]] * len(rows))
    ax.axvline(1, color="black", linewidth=1)
    ax.set(xlabel="paged / contiguous, time of a step", xlim=(0, 1.35 * max(row["ratio"] for row in rows)))
    return figure


_QUICK = DecodeBench(model="tiny", dtypes=("float32",), batches=(1, 8), contexts=(128, 512), pairs=5, allocation_seqs=64)

EXPERIMENT = Experiment(DecodeBench, _QUICK, _points, _measure, _report)
