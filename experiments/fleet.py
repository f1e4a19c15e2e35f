"""A simulation of many replicas behind a router: what routing by prefix is worth at scale.

It is a discrete-event simulation, not a measurement. Real are the prefix index and the block counts of every replica, and the decode step
times that its time model was fitted to; arrivals, think times and the network (which costs nothing) are assumed.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import simpy

from experiments import plot
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.replica import Replica, Served
from experiments.routing import ROUTERS, Router
from experiments.step_time import StepTime, fit_step_time, measured_steps

__all__ = ["EXPERIMENT", "Fleet", "simulate"]

_VOCAB = 32_000


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Replicas that serve chats, simulated."""

    replicas: tuple[int, ...] = (1, 4, 16, 64)
    """Replicas behind the router; the load grows with their number."""
    routers: tuple[str, ...] = tuple(ROUTERS)
    """random, round_robin, cache_aware."""
    requests_per_replica: int = 300
    """Chat turns to serve, for each replica."""
    rate_per_replica: float = 1.0
    """Chat turns a second that arrive, for each replica, if none had to wait."""
    turns: float = 5.0
    """Mean turns of a chat."""
    think_s: float = 10.0
    """Mean seconds from an answer to the next turn."""
    system_prompts: int = 100
    """Different first texts of chats, of 500 tokens in the mean."""
    block_size: int = 16
    """Tokens a KV block holds."""
    pool_blocks: int = 2000
    """Blocks of a replica."""
    max_batch: int = 32
    """Sequences a replica decodes at a time."""
    measured: str = ""
    """rows.jsonl of decode_bench that the step time is fitted to; by default SmolLM2-135M on two CPU cores, from docs/measured."""
    first_token_goal_s: float = 1.0
    """A good request has its first token by then,"""
    token_goal_s: float = 0.2
    """and later tokens at this pace or faster."""
    seed: int = 0
    """Seed of arrivals, texts and random routing."""

    def __post_init__(self) -> None:
        if unknown := set(self.routers) - set(ROUTERS):
            raise ValueError(f"routers must be of {', '.join(ROUTERS)}; got {', '.join(sorted(unknown))}")
        for name in ("requests_per_replica", "rate_per_replica", "think_s", "system_prompts", "block_size", "pool_blocks", "max_batch"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.replicas or min(self.replicas) < 1 or self.turns < 1:
            raise ValueError(f"replicas and turns must be 1 or more, got {self.replicas} and {self.turns}")


def _points(config: Fleet) -> Iterator[Point]:
    for replicas in config.replicas:
        for router in config.routers:
            yield {"replicas": replicas, "router": router}


def _measure(config: Fleet, point: Point) -> Row:
    served, seconds = simulate(config, point["replicas"], ROUTERS[point["router"]], fit_step_time(measured_steps(config.measured)))
    firsts = np.asarray([each.first_s - each.arrival_s for each in served])
    whole = np.asarray([each.end_s - each.arrival_s for each in served])
    good = sum(_is_good(config, each) for each in served)
    return {
        "requests": len(served),
        "hit_percent": 100 * sum(each.hit_tokens for each in served) / sum(each.prompt_tokens for each in served),
        "requests_per_s": len(served) / seconds,
        "goodput_per_s": good / seconds,
        "good_percent": 100 * good / len(served),
        "p50_first_token_s": float(np.percentile(firsts, 50)),
        "p99_first_token_s": float(np.percentile(firsts, 99)),
        "p99_latency_s": float(np.percentile(whole, 99)),
    }


def _is_good(config: Fleet, served: Served) -> bool:
    pace = (served.end_s - served.first_s) / max(1, served.output_tokens - 1)
    return served.first_s - served.arrival_s <= config.first_token_goal_s and pace <= config.token_goal_s


def simulate(
    config: Fleet, num_replicas: int, make_router: Callable[[Sequence[Replica], np.random.Generator], Router], time: StepTime
) -> tuple[list[Served], float]:
    """Serves chats until so many turns have been asked and answered.

    Returns:
      (requests, seconds): all that were served, and the simulated time it took.
    """
    env = simpy.Environment()
    rng, routing_rng = (np.random.default_rng([config.seed, stream]) for stream in (0, 1))
    replicas = [
        Replica(env, time, block_size=config.block_size, pool_blocks=config.pool_blocks, max_batch=config.max_batch)
        for _ in range(num_replicas)
    ]
    router = make_router(replicas, routing_rng)
    systems = [_text(rng, 500) for _ in range(config.system_prompts)]
    total = config.requests_per_replica * num_replicas
    served: list[Served] = []

    def chat(history: np.ndarray, turns: int) -> Generator[simpy.Event, Any, None]:
        for _ in range(turns):
            if len(served) == total:
                return
            request = Served(np.concatenate([history, _text(rng, 60)]), _text(rng, 130), env.now, env.event())
            served.append(request)
            router(request.prompt).put(request)
            yield request.done
            history = np.concatenate([request.prompt, request.output])
            yield env.timeout(rng.exponential(config.think_s))

    def arrivals() -> Generator[simpy.Event, Any, None]:
        chats = []
        while len(served) < total:
            history = systems[rng.integers(len(systems))]
            chats.append(env.process(chat(history, int(rng.geometric(1 / config.turns)))))
            yield env.timeout(rng.exponential(config.turns / (config.rate_per_replica * num_replicas)))
        yield env.all_of(chats)

    env.run(until=env.process(arrivals()))
    return served, max(request.end_s for request in served)


def _text(rng: np.random.Generator, mean: float, spread: float = 0.5) -> np.ndarray:
    """A text of random tokens and log-normal length."""
    return rng.integers(1, _VOCAB, max(1, round(rng.lognormal(np.log(mean) - spread**2 / 2, spread))), dtype=np.int32)


def _report(config: Fleet, rows: Sequence[Row]) -> Iterator[Part]:
    time = fit_step_time(measured_steps(config.measured))
    parts = f"{1e3 * time.step_s:.3g} ms, {1e3 * time.seq_s:.3g} ms a sequence and {1e6 * time.token_s:.3g} µs a token of context"
    yield (
        "**This is a simulation.** Assumed: chats arrive as a Poisson process, and the next turn follows an answer after an exponential "
        f"time. A decode step takes {parts} (fitted to measured steps); a prompt token that is not found takes what one more sequence "
        "takes in a step. Prompts are computed one at a time, between decode steps. Routing and network cost nothing; no replica fails. "
        "The router of cache_aware remembers where it sent each prefix and is not told of evictions; it sends a request there unless that "
        "replica has much more to do than the others. The indexes, their eviction and the block counts of the replicas are those of the "
        f"library. Goals: the first token within {config.first_token_goal_s:g} s, later ones every {config.token_goal_s:g} s."
    )
    yield Table(rows, ("replicas", "router", *(key for key in rows[0] if key not in ("replicas", "router"))))
    yield Picture(
        "fleet", "Simulated: hits, requests within the goals, and first tokens, against the number of replicas.", _figure(config, rows)
    )


def _figure(config: Fleet, rows: Sequence[Row]) -> Any:
    panels = {
        "hit_percent": "prompt tokens found, %",
        "good_percent": "requests within the goals, %",
        "p99_first_token_s": "first token, p99, s",
    }
    figure, axes = plot.grid(1, len(panels), width=3.3, height=2.7)
    for ax, (column, label) in zip(axes, panels.items(), strict=True):
        series = {}
        for router in config.routers:
            chosen = [row for row in rows if row["router"] == router]
            series[router.replace("_", " ")] = ([row["replicas"] for row in chosen], [row[column] for row in chosen])
        plot.log_ticks(ax, [row["replicas"] for row in rows])
        plot.lines(ax, series, xlabel="replicas", ylabel=label, ylim=(0, 103 if "percent" in column else None))
    return figure


_QUICK = Fleet(replicas=(1, 4, 16), requests_per_replica=150)

EXPERIMENT = Experiment(Fleet, _QUICK, _points, _measure, _report)
