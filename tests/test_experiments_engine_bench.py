"""The engine benchmark on a tiny decoder: rows, report, and static batches that never mix."""

import itertools
import json

import numpy as np
import pytest
from flax import nnx

from experiments import engine_speculation, engine_throughput, engine_waits
from experiments.engine_bench import EXPERIMENT, EngineBench
from experiments.engine_throughput import CONTINUOUS, STATIC, STATIC_PAGED, make_workload
from experiments.engine_waits import ONE_BY_ONE, TOGETHER
from experiments.experiment import Picture
from experiments.serving import Arrival, serve
from jaxpage.engine import Engine, EngineOptions
from jaxpage.engine import options as engine_options
from models import Decoder, ModelConfig

TINY = ModelConfig(
    vocab_size=4096, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_length=256
)
CONFIG = EngineBench(
    dtype="float32",
    block_size=8,
    tokens_per_pass=32,
    requests=9,
    max_length=48,
    static_batch=2,
    max_seqs=4,
    prefix_tokens=32,
    own_tokens=4,
    users=3,
    user_output_tokens=4,
    host_seqs=2,
    host_tokens=8,
    index_tokens=1000,
    speculation="none",
    repeats=2,
)


@pytest.fixture(scope="module")
def small():
    return Decoder(TINY, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def rows(small):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_options, "SEQ_BUCKETS", (256,))  # compiling takes most of the time here
        for module in (engine_throughput, engine_waits):
            patch.setattr(module, "decoder", lambda *_: small)
            module._programs.cache_clear()
        yield [json.loads(json.dumps({**point, **EXPERIMENT.measure(CONFIG, point)})) for point in EXPERIMENT.points(CONFIG)]
        for module in (engine_throughput, engine_waits):
            module._programs.cache_clear()


def chosen(rows, **values):
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def test_all_systems_serve_the_same_requests(rows):
    throughput = chosen(rows, row="throughput")
    assert [row["system"] for row in throughput] == [STATIC, STATIC_PAGED, CONTINUOUS] * 2
    for row in throughput:
        assert row["output_tokens"] == sum(each.output_tokens for each in make_workload(CONFIG).arrivals)
        assert row["tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"])
        assert 0 < row["mean_first_token_s"] < row["mean_latency_s"] <= row["seconds"]
    by_system = {row["system"]: row for row in throughput}
    assert by_system[STATIC]["batches"] == 5 >= by_system[STATIC_PAGED]["batches"] > 1  # two at a time, or more where they are short
    assert by_system[CONTINUOUS]["batches"] is None
    assert by_system[STATIC]["memory_use_percent"] < by_system[CONTINUOUS]["memory_use_percent"] <= 100


def test_lengths_are_divided_by_one_number_so_that_the_longest_fits():
    workload = make_workload(CONFIG)
    assert workload.scale > 1 and workload.longest == 48
    assert len(workload.arrivals) == 9
    for each in workload.arrivals:
        assert len(each.prompt) >= 1 and each.output_tokens >= 1 and len(each.prompt) + each.output_tokens <= 48
    assert make_workload(EngineBench(max_length=4096)).scale == 1


def test_the_prefix_is_computed_once(rows):
    prefix = chosen(rows, row="prefix")
    assert [(row["arrival"], row["index"]) for row in prefix] == [
        (arrival, index) for arrival in (ONE_BY_ONE, TOGETHER) for index in ("hash", "radix", "none")
    ]
    for row in prefix:
        assert row["hit_tokens"] == (0 if row["index"] == "none" else 2 * CONFIG.prefix_tokens)
        assert len(row["waits_ms"]) == row["users"] == 3 and min(row["waits_ms"]) > 0
        assert 0 < row["ratio"] <= row["slowest_ratio"]


def test_the_other_rows(rows):
    (host,) = chosen(rows, row="host")
    assert 0 < host["host_percent"] < 100 and host["thread_percent"] > 0 and host["passes"] >= 2
    assert host["host_seconds"] + host["wait_seconds"] <= host["seconds"] * 1.01
    assert [row["index"] for row in chosen(rows, row="index")] == ["hash", "radix"]
    assert all(min(row["insert_tokens_per_s"], row["match_tokens_per_s"]) > 0 for row in chosen(rows, row="index"))


def test_the_report_names_goals_and_measured_values(rows):
    parts = list(EXPERIMENT.report(CONFIG, rows))
    text = " ".join(part for part in parts if isinstance(part, str))
    for said in ("at least 2 times", "at most 0.2:", "at most 5 %", "at least 5 million each", "divided by"):
        assert said in text
    assert [part.name for part in parts if isinstance(part, Picture)] == ["engine"]
    peer = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "jaxpage_tokens_per_s": 3.0, "transformers_tokens_per_s": 2.0}
    more = [
        {"row": "peer", "peer": "transformers 5", **peer},
        {"row": "speculation", "batch": 1, "left_out": "no network"},
        {"row": "speculation", "batch": 4, "speedup": 2.0, "kept_per_step": 1.0, "same_tokens": True},
    ]
    text = " ".join(part for part in EXPERIMENT.report(CONFIG, [*rows[:2], *more]) if isinstance(part, str))
    assert "**1.50 times**" in text and "at least 1.3 times: met" in text
    assert "batch 1 were not measured: no network" in text and "**2.00 times**" in text


def test_static_batches_never_mix(small):
    options = EngineOptions(num_blocks=9, block_size=4, max_seqs=2, max_length=32, prefix_index="none")
    arrivals = [Arrival(0.0, list(range(1, 2 + number)), 3 + 2 * number) for number in range(5)]
    for places, sizes in ((16, [2, 2, 1]), (4, [2, 2, 1]), (32, [1] * 5)):  # the memory, or the engine's rows, set the limit
        served, samples = serve(Engine(small, options), arrivals, lambda tokens, places=places: places, in_batches=True)
        starts, counts = np.unique([each.start_s for each in served], return_counts=True)
        assert counts.tolist() == sizes
        batches = [[each for each in served if each.start_s == start] for start in starts]
        for before, after in itertools.pairwise(batches):
            assert max(each.end_s for each in before) <= min(each.start_s for each in after)
        assert max(sample.reserved for sample in samples) == places * max(sizes)
    with pytest.raises(ValueError, match="static batching needs a reservation"):
        serve(Engine(small, options), arrivals, None, in_batches=True)


def test_drafts_with_a_model_and_without(monkeypatch, tiny):
    class Letters:
        def encode(self, text):
            return [ord(letter) % 97 for letter in text]

    class Loaded:
        decoder, tokenizer = tiny, Letters()

    config = EngineBench(dtype="float32", tokens_per_pass=16, max_seqs=4, users=2, host_seqs=2, speculation_tokens=16, repeats=1)
    monkeypatch.setattr(engine_speculation, "_model", lambda *_: Loaded)
    row = EXPERIMENT.measure(config, {"row": "speculation", "batch": 2})
    assert row["same_tokens"] and row["speedup"] > 0 and 0 <= row["kept_percent"] <= 100 and 0 <= row["kept_per_step"] <= 4

    def offline(*_):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(engine_speculation, "_model", offline)
    assert EXPERIMENT.measure(config, {"row": "speculation", "batch": 2}) == {"left_out": "no network"}


def test_bad_configurations():
    with pytest.raises(ValueError, match="users must be at least 2, got 1"):
        EngineBench(users=1)
    with pytest.raises(ValueError, match="tokens_per_pass must be above the 64 sequences"):
        EngineBench(tokens_per_pass=64)
    with pytest.raises(ValueError, match="speculation_batches must be positive"):
        EngineBench(speculation_batches=())
    with pytest.raises(ValueError, match="lengths must be one of"):
        EngineBench(lengths="long")
