"""What an engine refuses: one clear error each, and the other requests go on."""

import pytest
from helpers_engine import make_engine

from jaxpage import EngineOptions, SamplingParams


@pytest.fixture(scope="module")
def roomy(tiny):
    """An engine whose pool is never short; its index forgets between tests."""
    return make_engine(tiny, 400)


def test_requests_that_cannot_be_served_are_refused_with_the_reason(tiny, roomy):
    small = make_engine(tiny, 5)
    with pytest.raises(ValueError, match=r"20 tokens.* 4 blocks of 4"):
        small.submit(list(range(20)))
    for arguments, message in (
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [97]}, "vocabulary"),
        ({"prompt_ids": [1], "namespace": 3}, "namespace must be a string, got 3"),
        ({"prompt_ids": [1], "priority": "high"}, "priority must be an integer"),
        ({"prompt_ids": [1], "params": SamplingParams(temperature=1.0, top_k=3)}, "top_k"),
        ({"prompt_ids": [1], "params": SamplingParams(repetition_penalty=2.0)}, "penalties"),
        ({"prompt_ids": [1], "params": SamplingParams(logprobs=1)}, "logprobs"),
        ({"prompt_ids": [1], "params": SamplingParams(logit_bias={1: 1.0})}, "logit_bias"),
        ({"prompt_ids": [1], "params": SamplingParams(stop=("a",))}, "detokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            roomy.submit(**arguments)
    name = roomy.submit([1, 2], request_id=700)
    with pytest.raises(ValueError, match="700 is in use"):
        roomy.submit([3], request_id=700)
    assert roomy.abort(name).token_ids == ()
    for unknown in (700, 12345):
        with pytest.raises(KeyError, match=str(unknown)):
            roomy.abort(unknown)
    assert [update.completion.finish_reason for update in roomy.step()] == ["aborted"]
    small.submit([1])
    assert [each.finish_reason for each in small.close()] == ["aborted"]
    with pytest.raises(ValueError, match="closed"):
        small.submit([1])


def test_a_batch_is_taken_whole_or_not_at_all(tiny):
    engine = make_engine(tiny, 5)
    with pytest.raises(ValueError, match="30 tokens"):
        engine.generate([[1], list(range(30))])
    assert engine.unfinished == 0
    assert engine.step() == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"scheduling": "best"}, "no scheduling policy 'best'; there are: fcfs"),
        ({"eviction": "random"}, "one of lru, lfu"),
        ({"prefix_index": "tree"}, "no prefix index 'tree'; there are: radix, hash, none"),
        ({"preemption": "drop"}, "preemption must be recompute or swap"),
        ({"swap_bytes": -1}, "swap_bytes must be an integer from 0"),
        ({"tokens_per_pass": -5}, "tokens_per_pass must be"),
        ({"spare_share": 1.5}, "spare_share must be"),
        ({"max_seqs": 0}, "max_seqs must be"),
    ],
)
def test_options_out_of_range_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(num_blocks=10, **option)
