"""The block size sweep: its counts against plain arithmetic, the classic table, and the choice it makes."""

import numpy as np
import pytest
from test_experiments_memory import measured

from experiments import measure
from experiments.block_size import EXPERIMENT, BlockSize, choose
from experiments.experiment import Table
from experiments.lengths import load_lengths
from models import ModelConfig

TINY = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_length=256
)


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT, BlockSize(lengths=("short_chat",), requests=1000, hit_requests=40, pairs=0))


def test_the_classic_table_comes_out(rows):
    waste = {row["block_size"]: row["waste_percent"] for row in rows if row["row"] == "memory"}
    for block_size, percent in ((1, 0), (8, 2), (16, 4), (64, 15)):
        assert waste[block_size] == pytest.approx(percent, abs=1), block_size
    (classic,) = [
        part
        for part in EXPERIMENT.report(BlockSize(lengths=("short_chat",), pairs=0), rows)
        if isinstance(part, Table) and [row.get("block_size") for row in part.rows] == [1, 8, 16, 64]
    ]
    assert classic.columns[:2] == ("block_size", "waste_percent")


def test_counts_are_those_of_plain_arithmetic(rows):
    lengths = load_lengths("short_chat", 1000, 0)
    for row in rows:
        if row["row"] == "memory":
            size = row["block_size"]
            prompts, final = (-(-each // size) for each in (lengths.prompt, lengths.total))
            assert row["entries_per_request"] == pytest.approx(final.mean())
            assert row["table_bytes_per_request"] == pytest.approx(4 * final.mean())
            assert row["allocations_per_token"] == pytest.approx((final - prompts).sum() / lengths.output.sum())
            assert row["lookups_per_step"] == pytest.approx((prompts + final).mean() / 2)
            assert row["waste_percent"] == pytest.approx(100 * (1 - lengths.total.sum() / (final.sum() * size)))


def test_larger_blocks_hit_less(rows):
    hits = [row["hit_percent"] for row in rows if row["row"] == "hits"]
    assert len(hits) == 6 and all(np.diff(hits) <= 0) and hits[0] > hits[-1]


def test_times_are_measured_against_blocks_of_16(monkeypatch):
    monkeypatch.setattr(measure, "SIZES", {"tiny": TINY})
    monkeypatch.setattr("experiments.decode_step.SIZES", {"tiny": TINY})
    monkeypatch.setattr("experiments.attention_step.SIZES", {"tiny": TINY})
    config = BlockSize(block_sizes=(8,), lengths=("short_chat",), requests=20, hit_requests=5, batch=2, context=20, steps=2, pairs=2)
    rows = measured(EXPERIMENT, config)
    (row,) = [row for row in rows if row["row"] == "time"]
    assert row["attention_ms"] > 0 and row["step_ms"] > 0 and row["step_ratio_low"] <= row["step_ratio"] <= row["step_ratio_high"]
    assert "**short_chat: blocks of 8**" in "".join(part for part in EXPERIMENT.report(config, rows) if isinstance(part, str))


def candidate(block_size, waste, ratio=1.0, spread=0.01):
    times = {"step_ratio": ratio, "step_ratio_low": ratio - spread, "step_ratio_high": ratio + spread}
    return {"block_size": block_size, "waste_percent": waste, **times}


@pytest.mark.parametrize(
    "rows, chosen",
    [
        ([candidate(1, 0, 1.5), candidate(16, 4), candidate(64, 15, 0.95)], 16),
        ([candidate(1, 0, 1.5), candidate(16, 0.5), candidate(64, 1, 0.9)], 64),
        ([candidate(8, 2, 1.5, spread=0.6), candidate(16, 4)], 8),  # the time is not known to differ
        ([candidate(16, 0.5), candidate(32, 1.2)], 32),  # within a percent: the larger
        ([{"block_size": 8, "waste_percent": 2}, {"block_size": 64, "waste_percent": 15}], 8),  # no times
    ],
)
def test_the_choice(rows, chosen):
    assert choose(rows)["block_size"] == chosen
