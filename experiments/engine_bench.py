"""What the engine costs and gives: batching, shared prefixes, the host's share, the indexes' speed, and drafts.

Each figure is a ratio whose two sides run in turn, in one process and on the same engine. Weights are random: times do not depend on them,
but for drafts, whose rows take a real model.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from experiments.block_sizes import check_block_sizes
from experiments.decode_step import decoder
from experiments.engine_index import index_row
from experiments.engine_report import report
from experiments.engine_speculation import speculation_row
from experiments.engine_throughput import SYSTEMS, make_workload, run_workload, throughput_row
from experiments.engine_waits import ARRIVALS, host_row, prefix_row
from experiments.experiment import Experiment, Point, Row
from experiments.lengths import check_source
from experiments.peer import batching_row, transformers_process
from experiments.replay import INDEXES

__all__ = ["EXPERIMENT", "EngineBench"]


@dataclasses.dataclass(frozen=True)
class EngineBench:
    """Runs of the engine, each next to what it is compared with."""

    model: Literal["smollm2-135m", "tiny"] = "smollm2-135m"
    """Whose sizes the decoder has."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and cache."""
    block_size: int = 16
    """Tokens a KV block holds."""
    tokens_per_pass: int = 256
    """Most tokens of a pass that computes prompts."""
    lengths: str = "short_chat"
    """Of the requests: short_chat, long_chat, code, or the path of a trace, whose first requests are taken."""
    requests: int = 64
    """Requests of a throughput run, all there at the beginning."""
    max_length: int = 1024
    """Most tokens of a request: all lengths are divided by one number so that the longest fits."""
    static_batch: int = 8
    """Requests that the KV memory holds where each reserves as much as the longest needs; so the KV memory's size."""
    max_seqs: int = 64
    """Most sequences that run at a time."""
    prefix_tokens: int = 512
    """Tokens that all users begin with."""
    own_tokens: int = 16
    """Tokens that each of them adds."""
    users: int = 16
    """Users of the prefix."""
    user_output_tokens: int = 32
    """Tokens that each of them gets."""
    host_seqs: int = 16
    """Sequences of the run whose host work is measured."""
    host_tokens: int = 256
    """Tokens that each of them produces."""
    index_tokens: int = 100_000
    """Tokens of the prompt that the indexes take in and find."""
    speculation: Literal["smollm2-135m", "none"] = "smollm2-135m"
    """The real model of the rows of drafts (fetched the first time); none leaves them out."""
    speculation_batches: tuple[int, ...] = (1, 4)
    """Sequences decoded at a time there."""
    speculation_tokens: int = 128
    """Tokens that each of them produces."""
    num_drafts: int = 4
    """Most tokens guessed for a sequence and step."""
    peer: Literal["none", "transformers"] = "none"
    """Also measure transformers' continuous batching on the same requests."""
    peer_python: str = "python3"
    """The Python that has torch and transformers."""
    repeats: int = 3
    """Runs of each side."""
    seed: int = 0
    """Seed of weights, lengths and tokens."""

    def __post_init__(self) -> None:
        check_source(self.lengths)
        check_block_sizes((self.block_size,))
        lowest = {"max_length": 2, "users": 2, "user_output_tokens": 2, "index_tokens": 2}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "seed" and value < lowest.get(field.name, 1):
                raise ValueError(f"{field.name} must be at least {lowest.get(field.name, 1)}, got {value}")
        if not self.speculation_batches or min(self.speculation_batches) < 1:
            raise ValueError(f"speculation_batches must be positive and not empty, got {self.speculation_batches}")
        seqs = max(self.max_seqs, self.users, self.host_seqs, *self.speculation_batches)
        if self.tokens_per_pass <= seqs:
            raise ValueError(f"tokens_per_pass must be above the {seqs} sequences that decode together, got {self.tokens_per_pass}")


def _points(config: EngineBench) -> Iterator[Point]:
    for repeat in range(config.repeats):
        for system in SYSTEMS:  # side by side in time, so that a slow hour slows them all
            yield {"row": "throughput", "system": system, "repeat": repeat}
    if config.peer == "transformers":
        yield {"row": "peer"}
    for arrival in ARRIVALS:
        for index in (*INDEXES, "none"):
            yield {"row": "prefix", "index": index, "arrival": arrival}
    yield {"row": "host"}
    for index in INDEXES:
        yield {"row": "index", "index": index}
    if config.speculation != "none":
        for batch in config.speculation_batches:
            yield {"row": "speculation", "batch": batch}


def _peer_row(config: EngineBench, point: Point) -> Row:
    workload = make_workload(config)
    with transformers_process(config.peer_python) as ask:
        return batching_row(
            decoder(config.model, config.dtype, config.seed),
            config.dtype,
            workload.arrivals,
            ask,
            lambda: run_workload(config),
            num_blocks=config.static_batch * workload.longest // config.block_size,
            block_size=config.block_size,
            tokens_per_pass=config.tokens_per_pass,
            pairs=config.repeats,
        )


_ROWS: dict[str, Callable[[EngineBench, Point], Row]] = {
    "throughput": throughput_row,
    "peer": _peer_row,
    "prefix": prefix_row,
    "host": host_row,
    "index": index_row,
    "speculation": speculation_row,
}


def _measure(config: EngineBench, point: Point) -> Row:
    return _ROWS[point["row"]](config, point)


_QUICK = EngineBench(
    model="tiny",
    dtype="float32",
    requests=24,
    max_length=256,
    static_batch=4,
    max_seqs=16,
    tokens_per_pass=128,
    users=8,
    host_tokens=64,
    speculation="none",
    repeats=2,
)

EXPERIMENT = Experiment(EngineBench, _QUICK, _points, _measure, report)
