"""What sequences share: prefixes and forks, and what they must not share."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers_engine import check_engine, make_engine

import jaxpage
from jaxpage import SamplingParams

SIZES = (5, 17, 33, 16, 40, 2, 60, 1)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, 97, size).tolist() for size in SIZES]


@pytest.fixture(scope="module")
def roomy(tiny):
    """An engine whose pool is never short; its index forgets between tests."""
    return make_engine(tiny, 400)


def ids(completions):
    return [each.token_ids for each in completions]


def test_users_with_one_prefix_share_its_blocks(tiny, roomy, prompts):
    prefix = prompts[6]
    together = [[*prefix, token] for token in range(6)]
    alone = ids(jaxpage.generate(tiny, together, SamplingParams(max_tokens=6), block_size=4))
    before = roomy.stats()
    assert ids([roomy.generate([prompt], SamplingParams(max_tokens=6))[0] for prompt in together]) == alone
    after = roomy.stats()
    assert after.hit_tokens - before.hit_tokens >= 5 * len(prefix)
    assert after.blocks_used - before.blocks_used <= len(prefix) // 4 + 6 * 3
    check_engine(roomy)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_blocks_are_shared_while_their_first_owner_still_runs(tiny, index):
    engine = make_engine(tiny, 400, prefix_index=index)
    first = engine.submit(list(range(40)), SamplingParams(max_tokens=40))
    while not engine.stats().tokens:
        engine.step()
    second = engine.submit([*range(40), 3], SamplingParams(max_tokens=4))
    for _ in engine.stream(second):
        pass
    assert engine.stats().hit_tokens == 40
    assert engine.abort(first).finish_reason == "aborted"
    check_engine(engine)


def test_namespaces_share_nothing(roomy):
    prompt = list(range(50, 90))
    roomy.submit(prompt, SamplingParams(max_tokens=2), namespace="one")
    roomy.submit(prompt, SamplingParams(max_tokens=2), namespace="other")
    before = roomy.stats().hit_tokens
    while roomy.unfinished:
        roomy.step()
    assert roomy.stats().hit_tokens == before


def test_a_whole_prompt_in_the_index_still_computes_its_last_token(roomy):
    """Block size 4 and 8 equal tokens twice: at most 7 are hit."""
    prompt = [90, 91, 92, 93, 94, 95, 96, 90]
    first, before = roomy.generate([prompt], SamplingParams(max_tokens=3)), roomy.stats().hit_tokens
    second = roomy.generate([prompt], SamplingParams(max_tokens=3))
    assert ids(first) == ids(second)
    assert roomy.stats().hit_tokens - before == 7


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_equal_prompts_in_one_pass_share_only_what_is_written(tiny, prompts, index):
    engine = make_engine(tiny, 400, prefix_index=index)
    completions = engine.generate([prompts[3]] * 3, SamplingParams(max_tokens=5))
    assert ids(completions) == ids(jaxpage.generate(tiny, [prompts[3]] * 3, SamplingParams(max_tokens=5), block_size=4))
    check_engine(engine)


def test_users_who_come_together_wait_for_the_first_to_compute_what_they_share(tiny, prompts):
    """All at once, with one long document: it is computed once, and one copy is held."""
    document = prompts[6]
    together = [[*document, token] for token in range(8)]
    engine = make_engine(tiny, 400, max_seqs=8, tokens_per_pass=16)
    alone = ids(jaxpage.generate(tiny, together, SamplingParams(max_tokens=12), block_size=4))
    names = [engine.submit(prompt, SamplingParams(max_tokens=12)) for prompt in together]
    ends, most_running, most_blocks = {}, 0, 0
    while engine.unfinished:
        ends |= {update.prompt_index: update.completion.token_ids for update in engine.step() if update.completion is not None}
        stats = engine.stats()
        most_running, most_blocks = max(most_running, stats.running), max(most_blocks, stats.blocks_used)
    assert [ends[name] for name in names] == alone
    assert engine.stats().prompt_tokens == len(document) + 8
    assert most_running == 8 and most_blocks <= len(document) // 4 + 8 * 4
    check_engine(engine)


@pytest.mark.parametrize("apart", [{"namespace": "other"}, {"params": SamplingParams(max_tokens=4, prompt_logprobs=True)}])
def test_nobody_waits_for_what_cannot_be_shared(tiny, prompts, apart):
    engine = make_engine(tiny, 400, tokens_per_pass=16)
    engine.submit(prompts[6], SamplingParams(max_tokens=4))
    engine.submit(prompts[6], **{"params": SamplingParams(max_tokens=4), **apart})
    engine.step()
    assert engine.stats().running == 2


def test_prompt_logprobs_are_the_same_with_a_hit(tiny):
    """A block of 32 tokens and 33 tokens, twice."""
    engine = make_engine(tiny, 20, block_size=32)
    prompt = [(7 * place) % 97 for place in range(33)]
    asked = SamplingParams(max_tokens=2, prompt_logprobs=True)
    alone = jaxpage.generate(tiny, [prompt], asked, block_size=32)[0].prompt_logprobs
    for _ in range(2):
        got = engine.generate([prompt], asked)[0].prompt_logprobs
        assert got[0] is None
        np.testing.assert_allclose(got[1:], alone[1:], rtol=1e-5)
    assert engine.generate([prompt])[0].prompt_logprobs is None
    assert engine.stats().hit_tokens == 32


def test_forks_share_blocks_and_have_seeds_of_their_own(tiny, prompts):
    engine = make_engine(tiny, 400, prefix_index="none")
    sampled = [SamplingParams(max_tokens=10, temperature=1.0, seed=seed) for seed in range(4)]
    first = engine.submit(prompts[4], sampled[0])
    names = [first, *(engine.fork(first, each, from_prompt=True) for each in sampled[1:])]
    ends, most = {}, 0
    while engine.unfinished:
        for update in engine.step():
            if update.completion is not None:
                ends[update.prompt_index] = update.completion.token_ids
        check_engine(engine)
        most = max(most, engine.stats().blocks_used)
    assert [ends[name] for name in names] == ids(jaxpage.generate(tiny, [prompts[4]] * 4, sampled, block_size=4))
    assert engine.stats().prompt_tokens < len(prompts[4]) + 4
    assert most <= len(prompts[4]) // 4 + 4 * 4


def test_a_fork_goes_on_from_what_was_produced(tiny, roomy, prompts):
    parent = roomy.submit(prompts[1], SamplingParams(max_tokens=20))
    while len(roomy._runner.seqs[parent].transcript.token_ids) < 7:
        roomy.step()
    shared = tuple(roomy._runner.seqs[parent].transcript.token_ids)
    child = roomy.fork(parent, SamplingParams(max_tokens=len(shared) + 5, temperature=1.0, seed=3))
    ends = {}
    while roomy.unfinished:
        ends.update({update.prompt_index: update.completion for update in roomy.step() if update.completion is not None})
    assert ends[parent].token_ids == jaxpage.generate(tiny, prompts[1:2], SamplingParams(max_tokens=20), block_size=4)[0].token_ids
    assert ends[child].token_ids[: len(shared)] == shared
    rest = SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    assert ends[child].token_ids[len(shared) :] == jaxpage.generate(tiny, [[*prompts[1], *shared]], rest, block_size=4)[0].token_ids
    check_engine(roomy)


def test_new_weights_forget_old_prefixes_and_keep_the_pool(tiny, prompts):
    other = jax.tree.map(lambda leaf: leaf * 1.1, tiny)
    engine = make_engine(tiny, 100)
    engine.generate(prompts[2:3])
    running = engine.submit(prompts[4], SamplingParams(max_tokens=30))
    while not engine._runner.seqs[running].transcript.token_ids:
        engine.step()
    before = engine.stats().hit_tokens
    engine.set_model(other)
    assert engine.index.total == 0
    got = engine.generate([prompts[2], prompts[4]], SamplingParams(max_tokens=6))
    assert ids(got) == ids(jaxpage.generate(other, [prompts[2], prompts[4]], SamplingParams(max_tokens=6), block_size=4))
    assert engine.stats().hit_tokens == before
    while engine.unfinished:
        engine.step()
    check_engine(engine)
    deeper = dataclasses.replace(tiny.config, max_length=512)
    with pytest.raises(ValueError, match="the sizes of the old one"):
        engine.set_model(type("Other", (), {"config": deeper})())
