"""The experiments' command line, and the decode benchmark on a tiny decoder."""

import json
import sys

import pytest

from experiments import __main__ as command
from experiments import decode_bench
from experiments.runner import markdown_table, results_folder
from models import ModelConfig

TINY = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_length=256
)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
    command.main()


def test_list_names_every_experiment(monkeypatch, capsys):
    run(monkeypatch, "list")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(command.EXPERIMENTS)


def test_an_unknown_experiment_is_one_line_that_lists_them(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "decode_bensch")
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "there are: decode_bench" in err


def test_an_unknown_override_exits_with_2(monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "decode_bench", "--blok-size", "3")
    assert stopped.value.code == 2


def test_decode_bench_writes_rows_and_a_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode_bench, "SMOLLM2_135M", TINY)
    monkeypatch.chdir(tmp_path)
    arguments = ["--dtypes", "float32", "--batches", "1", "3", "--contexts", "20", "--steps", "4", "--pairs", "2", "--allocation-seqs", "8"]
    run(monkeypatch, "decode_bench", *arguments)
    (folder,) = (tmp_path / "results" / "decode_bench").iterdir()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [(row["row"], row.get("batch")) for row in rows] == [("step", 1), ("step", 3), ("allocation", None)]
    for row in rows[:2]:
        assert row["contiguous_step_ms"] > 0 and row["paged_step_ms"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert rows[2]["share"] > 0
    assert json.loads((folder / "config.json").read_text())["batches"] == [1, 3]
    table = (folder / "table.md").read_text()
    assert "| float32 | 3 | 20 |" in table and table in capsys.readouterr().out


def test_a_folder_belongs_to_one_configuration(tmp_path):
    one, two = (results_folder("x", decode_bench.DecodeBench(seed=seed), tmp_path) for seed in (0, 1))
    assert one != two and results_folder("x", decode_bench.DecodeBench(), tmp_path) == one


def test_tables_round_and_leave_gaps():
    assert (
        markdown_table([{"a": 1234.5678, "b": 0.12345}, {"a": "x"}], ["a", "b"]) == "| a | b |\n| --- | --- |\n| 1235 | 0.123 |\n| x |  |\n"
    )
