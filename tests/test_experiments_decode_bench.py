"""The decode benchmark on a tiny decoder."""

import json

from experiments import __main__ as command
from models import ModelConfig

TINY = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_length=256
)


def test_rows_table_and_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("experiments.decode_step.SIZES", {"tiny": TINY})
    monkeypatch.chdir(tmp_path)
    arguments = ["--dtypes", "float32", "--batches", "1", "3", "--contexts", "20", "--steps", "4", "--pairs", "2", "--allocation-seqs", "8"]
    command.main(["decode_bench", "--model", "tiny", *arguments])
    (folder,) = (tmp_path / "results" / "decode_bench").iterdir()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [(row["row"], row["batch"]) for row in rows] == [("step", 1), ("step", 3), ("allocation", 8)]
    for row in rows[:2]:
        assert row["contiguous_step_ms"] > 0 and row["paged_step_ms"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert rows[2]["share_percent"] > 0
    assert json.loads((folder / "config.json").read_text())["batches"] == [1, 3]
    assert "| float32 | 3 | 20 |" in (folder / "table.md").read_text() and (folder / "ratio.png").is_file()
    assert "contiguous step ms" in capsys.readouterr().out
