"""Trains a byte-level decoder, keeps Orbax checkpoints, and answers held-out tasks from the paged cache.

Every segment of steps begins from the checkpoint of the one before, and its batches depend on the step alone: a training that was
interrupted goes on to the very same bits.
"""

import dataclasses
import functools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import nnx

from experiments import plot
from experiments.experiment import Experiment, Part, Picture, Point, Row, Table
from experiments.runner import results_folder
from experiments.tasks import END, TASKS, Batches, FileBatches, TaskBatches, byte_tokenizer, held_out_tasks
from experiments.training import Trainer
from jaxpage.checkpoint import restore_arrays, save_arrays
from models import Decoder, LoadedModel, ModelConfig, save_checkpoint

__all__ = ["EXPERIMENT", "Train"]


@dataclasses.dataclass(frozen=True)
class Train:
    """Training of a small decoder on bytes, with checkpoints."""

    tasks: tuple[str, ...] = ("copy", "add")
    """copy (a word), add (two numbers below 100)."""
    file: str = ""
    """A text file to train on instead of the tasks."""
    steps: int = 3000
    """Steps in all."""
    segment: int = 250
    """Steps from one checkpoint to the next."""
    batch: int = 64
    """Rows of a step."""
    window: int = 48
    """Tokens of a row."""
    learning_rate: float = 3e-3
    """Peak of the schedule."""
    hidden_size: int = 128
    """Width of the decoder; its heads are 32 wide."""
    num_layers: int = 2
    """Layers of the decoder."""
    held_out: int = 200
    """Tasks of each kind that are answered after each segment."""
    seed: int = 0
    """Seed of weights and batches."""

    def __post_init__(self) -> None:
        if unknown := set(self.tasks) - set(TASKS):
            raise ValueError(f"tasks must be of {', '.join(TASKS)}; got {', '.join(sorted(unknown))}")
        if not self.tasks and not self.file:
            raise ValueError("there is nothing to train on: name tasks or a file")
        if min(self.steps, self.segment, self.batch, self.window, self.num_layers, self.held_out) < 1 or self.steps % self.segment:
            raise ValueError(f"steps must be a multiple of segment, and all sizes positive; got {self.steps} and {self.segment}")
        if self.hidden_size < 64 or self.hidden_size % 64:
            raise ValueError(f"hidden_size must be a multiple of 64, got {self.hidden_size}")


@functools.lru_cache(maxsize=1)
def _prepare(config: Train) -> tuple[Trainer, Batches]:
    tokenizer = byte_tokenizer(None if config.file else END)
    sizes = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.hidden_size // 32,
        num_kv_heads=config.hidden_size // 64,
        head_dim=32,
        max_length=1024,
        tie_embeddings=True,
    )
    trainer = Trainer(Decoder(sizes, rngs=nnx.Rngs(config.seed)), tokenizer, config.learning_rate, config.steps)
    if config.file:
        return trainer, FileBatches.read(config.file, tokenizer, config.batch, config.window, config.seed)
    return trainer, TaskBatches(config.tasks, tokenizer, config.batch, config.window, config.seed)


def _points(config: Train) -> Iterator[Point]:
    for step in range(config.segment, config.steps + 1, config.segment):
        yield {"step": step}


def _measure(config: Train, point: Point) -> Row:
    trainer, batches = _prepare(config)
    folder = results_folder("train", config)
    end = point["step"]
    begin = end - config.segment
    state = trainer.first()
    if begin:
        state = restore_arrays(folder / "states" / str(begin), state)
    state, loss = trainer.train(state, batches, range(begin, end))
    for old in (folder / "states").glob("*"):
        if old.name != str(begin):  # that one is needed until this segment's row is written
            shutil.rmtree(old)
    save_arrays(folder / "states" / str(end), state)
    if end == config.steps:
        shutil.rmtree(folder / "model", ignore_errors=True)
        save_checkpoint(
            LoadedModel(trainer.load(state), trainer.tokenizer, f"bytes-{config.num_layers}x{config.hidden_size}"), folder / "model"
        )
    names = () if config.file else config.tasks
    exact = {f"{name}_exact_percent": trainer.exact(state, held_out_tasks(name, config.held_out, config.seed)) for name in names}
    return {"loss_nats_per_token": loss, **exact}


def _report(config: Train, rows: Sequence[Row]) -> Iterator[Part]:
    last = rows[-1]
    folder = results_folder("train", config)
    exact = {key.removesuffix("_exact_percent"): value for key, value in last.items() if key.endswith("_exact_percent")}
    for name, percent in exact.items():
        yield f"After {last['step']} steps **{percent:.1f} %** of {config.held_out} held-out tasks ({name}) are answered exactly."
    if last["step"] == config.steps:
        prompt = "copy paged=" if "copy" in exact else "12+34=" if exact else "The "
        yield f"The model decodes from the paged cache: `jaxpage generate --model {folder}/model --prompt '{prompt}'`"
    yield Table(rows, ("step", "loss_nats_per_token", *(f"{name}_exact_percent" for name in exact)))
    yield Picture("loss", "Training loss, and exact answers to held-out tasks.", _figure(rows, exact))


def _figure(rows: Sequence[Row], names: Iterable[str]) -> Any:
    figure, axes = plot.grid(1, 2 if names else 1, width=3.9, height=2.8)
    steps = [row["step"] for row in rows]
    plot.log_heights(axes[0])
    plot.lines(axes[0], {"loss": (steps, [row["loss_nats_per_token"] for row in rows])}, xlabel="steps", ylabel="loss, nats a token")
    if names:
        series = {name: (steps, [row[f"{name}_exact_percent"] for row in rows]) for name in names}
        plot.lines(axes[1], series, xlabel="steps", ylabel="exact answers, %", ylim=(0, 103))
    return figure


_QUICK = Train(tasks=("copy",), steps=1000, segment=200, batch=32, window=40)

EXPERIMENT = Experiment(Train, _QUICK, _points, _measure, _report)
