"""Who is admitted next."""

import pytest
from helpers_engine import make_engine

from jaxpage import SamplingParams
from jaxpage.engine.policy import SCHEDULING, first_to_admit


class Waiting:
    """What the policies look at."""

    def __init__(self, arrival, priority=0, hit=0, passed_over=0):
        self.arrival, self.priority, self.hit, self.passed_over = arrival, priority, hit, passed_over


@pytest.mark.parametrize(("policy", "first"), [("fcfs", 0), ("longest-prefix", 2), ("priority", 1)])
def test_each_policy_has_its_order(policy, first):
    waiting = [Waiting(0), Waiting(1, priority=2, hit=3), Waiting(2, priority=1, hit=9), Waiting(3, priority=2, hit=9)]
    assert first_to_admit(waiting, SCHEDULING[policy], lambda seq: seq.hit, 5).arrival == first


@pytest.mark.parametrize("policy", SCHEDULING)
def test_whoever_was_passed_over_too_often_goes_first(policy):
    waiting = [Waiting(0, passed_over=4), Waiting(1, passed_over=6), Waiting(2, passed_over=5), Waiting(3, priority=9, hit=9)]
    assert first_to_admit(waiting, SCHEDULING[policy], lambda seq: seq.hit, 5).arrival == 1


def test_a_request_of_low_priority_is_not_starved(tiny):
    """Requests of high priority keep coming; the one of low priority waits for as many of them as the bound says, and no longer."""
    engine = make_engine(tiny, 400, max_seqs=1, scheduling="priority", max_passed_over=3)
    engine.submit([1], SamplingParams(max_tokens=2), priority=1)
    low = engine.submit([2], SamplingParams(max_tokens=2), priority=0)
    ended = []
    for _ in range(30):
        engine.submit([3], SamplingParams(max_tokens=2), priority=1)
        ended += [update.prompt_index for update in engine.step() if update.completion is not None]
    assert ended.index(low) == 4  # the first, which came before it, and three that came after
