"""Training: what is learned, and that an interrupted training goes on to the same bits."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import runner, train
from experiments.tasks import TASKS, FileBatches, TaskBatches, byte_tokenizer, held_out_tasks
from experiments.train import EXPERIMENT, Train
from jaxpage import cli
from jaxpage.checkpoint import restore_arrays, save_arrays

SMALL = Train(file="text.txt", steps=6, segment=2, batch=4, window=24, hidden_size=64, num_layers=1)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("Grüße, paged attention. " * 40)
    train._prepare.cache_clear()


def final_state(config: Train) -> dict[str, np.ndarray]:
    trainer, _ = train._prepare(config)
    folder = runner.results_folder("train", config) / "states" / str(config.steps)
    return {key: np.asarray(value) for key, value in restore_arrays(folder, trainer.first()).items()}


def test_an_interrupted_training_goes_on_to_the_same_bits(monkeypatch):
    runner.run("train", EXPERIMENT, SMALL)
    whole, rows = final_state(SMALL), runner.read_rows(runner.results_folder("train", SMALL))
    runner.results_folder("train", SMALL).rename("uninterrupted")

    def interrupted(folder, tree):
        save_arrays(folder, tree)
        if folder.name == "4":  # in the middle of a segment's end: the checkpoint is there, its row is not
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "save_arrays", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run("train", EXPERIMENT, SMALL)
    assert len(runner.read_rows(runner.results_folder("train", SMALL))) == 1
    monkeypatch.setattr(train, "save_arrays", save_arrays)
    train._prepare.cache_clear()  # as in a new process
    runner.run("train", EXPERIMENT, SMALL)
    again = final_state(SMALL)
    assert again.keys() == whole.keys()
    for key, value in whole.items():
        assert value.tobytes() == again[key].tobytes(), key
    assert runner.read_rows(runner.results_folder("train", SMALL)) == rows


def test_training_lowers_the_loss():
    config = Train(tasks=("copy",), steps=60, segment=20, batch=16, window=24, hidden_size=64, num_layers=1, held_out=2)
    runner.run("train", EXPERIMENT, config)
    losses = [row["loss_nats_per_token"] for row in runner.read_rows(runner.results_folder("train", config))]
    assert losses[0] > losses[1] > losses[2]


def test_a_file_is_trained_on_and_its_model_is_saved(tmp_path):
    config = dataclasses.replace(SMALL, steps=2)
    runner.run("train", EXPERIMENT, config)
    (row,) = runner.read_rows(runner.results_folder("train", config))
    assert set(row) == {"step", "loss_nats_per_token"}
    assert (runner.results_folder("train", config) / "model" / "jaxpage.json").is_file()


def test_bad_files_and_configurations():
    tokenizer = byte_tokenizer(None)
    pathlib.Path("short.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"short\.txt has 3 bytes; a window of 8 needs more than 9"):
        FileBatches.read("short.txt", tokenizer, 2, 8, 0)
    pathlib.Path("latin.txt").write_bytes(b"\xff\xfe\xfa" * 10)
    with pytest.raises(ValueError, match=r"latin\.txt is no UTF-8 text"):
        FileBatches.read("latin.txt", tokenizer, 2, 8, 0)
    with pytest.raises(ValueError, match="tasks must be of copy, add; got multiply"):
        Train(tasks=("multiply",))
    with pytest.raises(ValueError, match="nothing to train on"):
        Train(tasks=())
    with pytest.raises(ValueError, match="steps must be a multiple of segment"):
        Train(steps=100, segment=33)


def test_the_tokenizer_is_one_token_a_byte():
    tokenizer = byte_tokenizer("\n")
    text = "a\tb Grüße 🙂\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.vocab_size == 256 and tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == tuple(tokenizer.encode("\n"))


@pytest.mark.parametrize("name", TASKS)
def test_held_out_tasks_are_never_trained_on(name):
    tokenizer = byte_tokenizer("\n")
    held_out = {task.prompt for task in held_out_tasks(name, 300, 0)}
    batches = TaskBatches([name], tokenizer, 16, 60, 0)
    lines = [line for step in range(20) for row in batches(step).tokens for line in tokenizer.decode(row).split("\n")[:-1]]
    prompts = {line.partition("=")[0] + "=" for line in lines}
    assert len(prompts) > 300 and not prompts & held_out
    if name == "add":
        assert all(sum(map(int, line.partition("=")[0].split("+"))) == int(line.partition("=")[2]) for line in lines)


def test_only_answers_count_and_a_batch_depends_on_its_step_alone():
    tokenizer = byte_tokenizer("\n")
    batches = TaskBatches(["copy"], tokenizer, 4, 40, 7)
    one, again, other = batches(3), TaskBatches(["copy"], tokenizer, 4, 40, 7)(3), batches(4)
    np.testing.assert_array_equal(one.tokens, again.tokens)
    assert not np.array_equal(one.tokens, other.tokens)
    for row, weights in zip(one.tokens, one.weights, strict=True):
        counted = tokenizer.decode(row[1:][weights > 0])
        answers = [line.partition("=")[2] + "\n" for line in tokenizer.decode(row).split("\n")]
        assert "".join(answers).startswith(counted) and counted


@pytest.mark.slow
def test_the_quick_training_copies_and_its_checkpoint_decodes_by_the_command_line(capsys):
    config = EXPERIMENT.quick
    runner.run("train", EXPERIMENT, config)
    folder = runner.results_folder("train", config)
    assert runner.read_rows(folder)[-1]["copy_exact_percent"] >= 95
    before = jax.config.jax_compilation_cache_dir
    try:
        cli.main(["generate", "--model", str(folder / "model"), "--prompt", "copy paged=", "--json", "out.jsonl"])
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert json.loads(pathlib.Path("out.jsonl").read_text())["text"].strip() == "paged"
    assert jnp.isfinite(jnp.asarray(runner.read_rows(folder)[-1]["loss_nats_per_token"]))
