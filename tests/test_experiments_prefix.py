"""Replays against the prefix indexes: hit rates of workloads and traces, and the tree of greetings."""

import numpy as np
import pytest
from test_experiments_memory import TRACES, measured, needs_traces

from experiments.greeting_tree import GREETINGS, greeting_tree
from experiments.radix_vs_hash import EXPERIMENT, RadixVsHash
from experiments.replay import INDEXES, SCHEDULES, replay
from experiments.traces import read_trace
from experiments.workloads import WORKLOADS, Request, make_requests, mooncake_requests
from jaxpage.prefix import check_index


def text(*tokens):
    return np.asarray(tokens)


def common(one, other):
    size = min(len(one), len(other))
    return int(np.argmin([*(one[:size] == other[:size]), False]))


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_hits_without_limit_are_those_of_a_search_over_all(workload, name, block_size):
    requests = make_requests(workload, 40, 3)
    index = INDEXES[name](block_size, "lru")
    hits = replay(index, requests, None)
    check_index(index)
    held, expected = [], 0
    for request in requests:
        most = max((common(request.prompt[:-1], other) for other in held), default=0)
        expected += most if name == "radix" else most // block_size * block_size
        held.append(np.concatenate([request.prompt, request.output])[:-1])
    assert hits.hit_tokens == expected > 0
    assert hits.findable_tokens == sum(len(request.prompt) - 1 for request in requests)


@pytest.mark.parametrize("name", INDEXES)
def test_a_limit_holds_and_costs_hits(name):
    requests = make_requests("multi_turn", 60, 0)
    index = INDEXES[name](16, "lru")
    limited = replay(index, requests, 100)
    assert index.total <= 100 and limited.evicted_blocks > 0
    assert limited.hit_tokens < replay(INDEXES[name](16, "lru"), requests, None).hit_tokens


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_prompt_goes_on_from_what_came_before_it(workload):
    requests = make_requests(workload, 100, 5)
    assert len(requests) == 100
    for number, request in enumerate(requests):
        if request.after is not None:
            before = requests[request.after]
            assert request.after < number
            whole = np.concatenate([before.prompt, before.output])
            np.testing.assert_array_equal(request.prompt[: len(whole)], whole)


def test_the_longest_prefix_goes_first_but_never_before_what_it_needs():
    one, two = (Request(text(*range(start, start + 8)), text(90 + start)) for start in (10, 50))
    after = Request(np.concatenate([one.prompt, one.output, text(7)]), text(8), after=0)
    served = []

    def watched(index, waiting):
        chosen = SCHEDULES["longest_prefix"](index, waiting)
        served.append(waiting[chosen])
        return chosen

    replay(INDEXES["radix"](1, "lru"), [one, two, after], None, schedule=watched, queue=3)
    assert [len(request.prompt) for request in served] == [8, 10, 8] and served[0] is one


def test_three_greetings():
    nodes = greeting_tree()
    assert [node["text"] for node in nodes] == ["H", "ello, how ", "i there!", "are you?", "can I help?"]

    def whole(at):
        node = nodes[at]
        return ("" if node["parent"] is None else whole(node["parent"])) + node["text"]

    assert sorted(whole(at) for at in (2, 3, 4)) == sorted(GREETINGS)


def test_every_row_and_the_report(tmp_path):
    config = RadixVsHash(requests=20, block_sizes=(4, 16), cache_tokens=(1000,), workloads=("few_shot",))
    rows = measured(EXPERIMENT, config)
    assert {row["row"] for row in rows} == {"block_size", "cache", "policy", "schedule", "tree"}
    pictures = [part.name for part in EXPERIMENT.report(config, rows) if hasattr(part, "figure")]
    assert pictures == ["block_size", "cache", "tree"]


def test_bad_configurations():
    with pytest.raises(ValueError, match="workloads must be of multi_turn"):
        RadixVsHash(workloads=("chat",))
    with pytest.raises(ValueError, match=r"only Mooncake traces \(\.jsonl\)"):
        RadixVsHash(traces=("a.csv",))


@needs_traces
@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize(
    "trace, percents",
    [
        ("mooncake_conversation.jsonl", {None: 36.64, 1000: 4.45, 5000: 11.18, 10000: 21.16, 50000: 35.46}),
        ("mooncake_synthetic.jsonl", {None: 63.96, 1000: 8.41, 5000: 27.93, 10000: 42.39, 50000: 63.96}),
    ],
)
def test_mooncake(name, trace, percents):
    requests = mooncake_requests(read_trace(TRACES / trace).prefix_ids)
    for blocks, percent in percents.items():
        assert replay(INDEXES[name](1, "lru"), requests, blocks).percent == pytest.approx(percent, abs=0.05), blocks
