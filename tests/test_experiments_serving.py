"""Serving runs: every request gets its tokens, reservations are respected, and the report says what came out."""

import numpy as np
import pytest
from flax import nnx

from experiments import paged_vs_contiguous
from experiments.paged_vs_contiguous import EXPERIMENT, PagedVsContiguous
from experiments.serving import Arrival, poisson, serve
from jaxpage.engine import Engine, EngineOptions
from models import Decoder, ModelConfig

TINY = ModelConfig(
    vocab_size=1024, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, max_length=256
)
CONFIG = PagedVsContiguous(requests=8, rates_per_s=(0.0,), repeats=1, budget_tokens=256, max_length=64, block_size=8, max_seqs=4)


@pytest.fixture(scope="module")
def small():
    return Decoder(TINY, rngs=nnx.Rngs(0))


def arrivals():
    return [Arrival(0.0, list(range(1, 2 + number)), 5 + number) for number in range(6)]


def engine_of(model, num_blocks):
    return Engine(model, EngineOptions(num_blocks=num_blocks, block_size=4, max_seqs=4, max_length=32, prefix_index="none"))


def test_a_request_starts_when_its_reservation_fits(small):
    served, samples = serve(engine_of(small, 9), arrivals(), lambda tokens: 16)  # 32 places: two at a time
    assert max(sample.reserved for sample in samples) == 32
    assert all(0 < each.first_s <= each.end_s for each in served)
    ends = sorted(each.end_s for each in served)
    assert all(sum(other.first_s < each.end_s <= other.end_s for other in served) <= 2 for each in served) and len(ends) == 6
    assert all(sample.used <= sample.reserved for sample in samples)


def test_paging_reserves_what_its_blocks_are(small):
    engine = engine_of(small, 30)
    served, samples = serve(engine, arrivals(), None)
    assert all(each.end_s > 0 for each in served) and engine.usage().blocks_used == 0
    assert all(sample.used <= sample.reserved <= 29 * 4 and sample.reserved % 4 == 0 for sample in samples)


def test_a_reservation_beyond_the_memory_is_refused(small):
    with pytest.raises(ValueError, match="a request reserves 64 tokens, the pool holds 32"):
        serve(engine_of(small, 9), arrivals(), lambda tokens: 64)


def test_arrivals():
    times = poisson(4.0, 4000, np.random.default_rng(0))
    assert times[-1] / 4000 == pytest.approx(0.25, rel=0.05) and np.all(np.diff(times) > 0)
    assert not poisson(None, 3, np.random.default_rng(0)).any()


def test_rows_and_report_of_all_systems(small, monkeypatch):
    monkeypatch.setattr(paged_vs_contiguous, "decoder", lambda *_: small)
    paged_vs_contiguous._programs.cache_clear()
    rows = [{**point, **EXPERIMENT.measure(CONFIG, point)} for point in EXPERIMENT.points(CONFIG)]
    paged_vs_contiguous._programs.cache_clear()
    assert [row["system"] for row in rows] == ["maximum", "power of two", "foresight", "paged"]
    uses = [row["memory_use_percent"] for row in rows]
    assert min(uses) > 0 and uses[3] == max(uses) <= 100
    parts = list(EXPERIMENT.report(CONFIG, rows))
    assert "memory use goes from" in parts[1] and "The goal was" in parts[1]
    assert [part.name for part in parts if hasattr(part, "figure")] == ["rates", "memory"]


def test_bad_configurations():
    with pytest.raises(ValueError, match="budget_tokens must hold max_length, both in whole blocks; got 100 and 512"):
        PagedVsContiguous(budget_tokens=100)
    with pytest.raises(ValueError, match="rates_per_s not negative"):
        PagedVsContiguous(rates_per_s=(-1.0,))
