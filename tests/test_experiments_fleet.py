"""The simulated fleet: time model, routers, and accounts that must balance."""

import json

import numpy as np
import pytest
import simpy
from test_experiments_memory import measured

from experiments.fleet import EXPERIMENT, Fleet, simulate
from experiments.replica import Replica, Served
from experiments.routing import ROUTERS
from experiments.step_time import StepTime, fit_step_time, measured_steps
from jaxpage.prefix import check_index

SMALL = Fleet(replicas=(4,), requests_per_replica=60, system_prompts=8)


def test_the_fit_finds_the_parts_of_a_time():
    true = StepTime(0.03, 0.0005, 5e-6)
    steps = [(seqs, context, 1e3 * true.decode_s(seqs, seqs * context)) for seqs in (1, 8, 32) for context in (128, 1024)]
    np.testing.assert_allclose(fit_step_time(steps), true, rtol=1e-6)


def test_no_part_of_a_fit_is_negative():
    time = fit_step_time([(1, 100, 10.0), (2, 100, 8.0), (4, 100, 6.0), (8, 1000, 7.0)])
    assert min(time) >= 0 and max(time) > 0


def test_steps_are_read_from_rows_of_the_benchmark(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"row": "step", "batch": seqs, "context": 64, "paged_step_ms": 2.0 * seqs} for seqs in (1, 2, 3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"row": "allocation"}]))
    assert measured_steps(str(file)) == [(1, 64, 2.0), (2, 64, 4.0), (3, 64, 6.0)]
    file.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="has 1 decode steps"):
        measured_steps(str(file))
    assert len(measured_steps("")) == 6


@pytest.mark.parametrize("router", ROUTERS)
def test_all_requests_are_served_in_order_of_time(router):
    served, seconds = simulate(SMALL, 4, ROUTERS[router], fit_step_time(measured_steps("")))
    assert len(served) == 240
    for each in served:
        assert 0 <= each.arrival_s < each.first_s <= each.end_s <= seconds
        assert 0 <= each.hit_tokens < each.prompt_tokens


def test_routing_by_prefix_finds_more():
    rows = {row["router"]: row for row in measured(EXPERIMENT, SMALL)}
    assert rows["cache_aware"]["hit_percent"] > rows["random"]["hit_percent"] + 10
    assert rows["cache_aware"]["p99_first_token_s"] <= rows["random"]["p99_first_token_s"]


def request(env, rng, prompt, output):
    return Served(rng.integers(1, 50, prompt), rng.integers(1, 50, output), env.now, env.event())


def test_a_replica_never_uses_more_blocks_than_it_has_and_gives_all_back():
    env, rng = simpy.Environment(), np.random.default_rng(0)
    replica = Replica(env, StepTime(0.01, 0.001, 1e-6), block_size=4, pool_blocks=40, max_batch=8)
    requests = [request(env, rng, int(rng.integers(5, 60)), int(rng.integers(1, 60))) for _ in range(60)]
    for each in requests:
        replica.put(each)
    while any(not each.done.processed for each in requests):
        env.step()
        own = sum(len(running.blocks) - len(running.match.blocks) for running in replica.running)
        assert own + replica.index.total <= 40
    check_index(replica.index)
    assert replica.index.protected == 0 and not replica.load
    assert sorted([*replica._free, *replica.index.blocks]) == list(range(1, 41))


def test_a_request_that_can_never_fit_is_refused():
    env, rng = simpy.Environment(), np.random.default_rng(0)
    replica = Replica(env, StepTime(0.01, 0.001, 1e-6), block_size=4, pool_blocks=4, max_batch=8)
    with pytest.raises(ValueError, match="needs 5 blocks, a replica has 4"):
        replica.put(request(env, rng, 16, 1))


def test_the_time_of_one_request_alone():
    env, rng = simpy.Environment(), np.random.default_rng(0)
    replica = Replica(env, StepTime(1.0, 0.1, 0.0), block_size=4, pool_blocks=40, max_batch=8)
    one = request(env, rng, 10, 3)
    replica.put(one)
    env.run(until=one.done)
    assert one.first_s == pytest.approx(1.0 + 10 * 0.1)
    assert one.end_s == pytest.approx(one.first_s + 2 * 1.1)  # the first token comes with the prompt


def test_the_report_says_that_it_is_a_simulation():
    rows = measured(EXPERIMENT, SMALL)
    assert next(iter(EXPERIMENT.report(SMALL, rows))).startswith("**This is a simulation.** Assumed: ")


def test_bad_configurations():
    with pytest.raises(ValueError, match="routers must be of random, round_robin, cache_aware; got best"):
        Fleet(routers=("best",))
    with pytest.raises(ValueError, match="pool_blocks must be positive"):
        Fleet(pool_blocks=0)
