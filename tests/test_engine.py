"""The engine against `generate`: whatever is shared, preempted, swapped or forked, each request gets its own tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers_engine import LEAN, PROGRAMS, check_engine, make_engine

import jaxpage
from jaxpage import Engine, EngineOptions, Features, SamplingParams
from jaxpage.programs import Programs

SIZES = (5, 17, 33, 16, 40, 2, 60, 1)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, 97, size).tolist() for size in SIZES]


@pytest.fixture(scope="module")
def params():
    return [SamplingParams(max_tokens=12 + index, temperature=float(index % 2), seed=index) for index in range(len(SIZES))]


@pytest.fixture(scope="module")
def wanted(tiny, prompts, params):
    return [each.token_ids for each in jaxpage.generate(tiny, prompts, params, block_size=4)]


@pytest.fixture(scope="module")
def roomy(tiny):
    """An engine whose pool is never short; its index forgets between tests."""
    return make_engine(tiny, 400)


def ids(completions):
    return [each.token_ids for each in completions]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 400},
        {"num_blocks": 400, "tokens_per_pass": 8},
        {"num_blocks": 30},
        {"num_blocks": 30, "prefix_index": "hash"},
        {"num_blocks": 30, "prefix_index": "none"},
        {"num_blocks": 30, "preemption": "swap", "swap_bytes": 10**8},
        {"num_blocks": 30, "preemption": "swap", "swap_bytes": 20_000},
        {"num_blocks": 60, "scheduling": "longest-prefix"},
        {"num_blocks": 60, "scheduling": "priority"},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_each_prompt_gets_its_own_tokens(tiny, prompts, params, wanted, options):
    engine = make_engine(tiny, **options)
    for _ in range(2):  # the second time prefixes are there already
        completions = engine.generate(prompts, params)
        assert ids(completions) == wanted
        assert [each.finish_reason for each in completions] == ["length"] * len(SIZES)
        check_engine(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.swapped_bytes) == (0, 0, 0)
    assert stats.blocks_used == stats.blocks_cached
    assert stats.tokens == 2 * sum(map(len, wanted))
    assert (stats.preemptions > 0) == (options["num_blocks"] == 30)
    if engine.index is None:
        assert stats.blocks_used == 0
    elif options["num_blocks"] == 400:
        held = 4 if options.get("prefix_index") == "hash" else 1
        assert stats.hit_tokens >= sum((size - 1) // held * held for size in SIZES)


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


def test_a_pool_that_fits_one_request_serves_ten_in_turn(tiny, prompts):
    engine = make_engine(tiny, 12, prefix_index="none")
    wanted = ids(jaxpage.generate(tiny, prompts[2:3], SamplingParams(max_tokens=9), block_size=4))
    for _ in range(10):
        assert ids(engine.generate(prompts[2:3], SamplingParams(max_tokens=9))) == wanted
        assert int(engine._device.state.cache.pool.num_free) == 11


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


def test_all_of_the_sampler_is_the_same_as_in_a_batch(tiny, prompts):
    asked = [
        SamplingParams(max_tokens=40, temperature=0.8, top_k=7, seed=1, logprobs=2),
        SamplingParams(max_tokens=40, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(max_tokens=40, temperature=1.2, top_p=0.7, min_p=0.05, seed=3),
        SamplingParams(max_tokens=40, logit_bias={5: 3.0, 6: -8.0}, stop_ids=(5,), min_tokens=2, logprobs=0),
        SamplingParams(max_tokens=40),
    ]
    # The pool is too small for all of them: penalties count again what was produced before a preemption.
    features = Features(random=True, truncated=True, penalised=True, num_biases=2, num_stop_ids=1, num_logprobs=2)
    engine = make_engine(tiny, 30, features=features)
    for one, other in zip(engine.generate(prompts[:5], asked), jaxpage.generate(tiny, prompts[:5], asked, block_size=4), strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token_id == theirs.token_id
            np.testing.assert_allclose(mine.logprob, theirs.logprob, rtol=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    assert engine.stats().preemptions > 0


def test_stop_strings_and_streams(tiny, prompts):
    def detokenize(tokens):
        return "".join(f"<{token}>" for token in tokens)

    engine = Engine(tiny, make_engine(tiny, 400).options, detokenize=detokenize, programs=PROGRAMS)
    plain = jaxpage.generate(tiny, prompts[:2], SamplingParams(max_tokens=20), block_size=4)
    text = detokenize(plain[0].token_ids)
    stop = text[text.index(">", 8) - 2 : text.index(">", 8) + 2]  # goes over two tokens
    asked = SamplingParams(max_tokens=20, stop=(stop,))
    names = [engine.submit(prompts[0], asked), engine.submit(prompts[1], SamplingParams(max_tokens=20))]
    second = [update for update in engine.stream(names[1])]
    first = [update for update in engine.stream(names[0])]  # has ended meanwhile: its news were kept
    assert sum((update.token_ids for update in second), ()) == second[-1].completion.token_ids == plain[1].token_ids
    assert first[-1].completion.finish_reason == "stop"
    assert first[-1].completion.text == text[: text.index(stop)]
    assert sum((update.token_ids for update in first), ()) == first[-1].completion.token_ids
    with pytest.raises(KeyError, match=f"no request {names[0]}"):
        engine.stream(names[0])
    check_engine(engine)


def test_a_sequence_that_outgrows_the_pool_ends_and_the_others_go_on(tiny, prompts):
    engine = make_engine(tiny, 12, prefix_index="none")
    large, small = engine.generate([prompts[1], prompts[0]], [SamplingParams(max_tokens=60), SamplingParams(max_tokens=8)])
    assert large.finish_reason == "out_of_blocks"
    assert len(large.token_ids) == 44 - len(prompts[1]) + 1  # all of the pool, and the token that has no place in it
    assert large.token_ids == jaxpage.generate(tiny, prompts[1:2], SamplingParams(max_tokens=60), block_size=4)[0].token_ids[:28]
    assert small.token_ids == jaxpage.generate(tiny, prompts[:1], SamplingParams(max_tokens=8), block_size=4)[0].token_ids
    check_engine(engine)
    assert engine.stats().blocks_used == 0


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


def test_nothing_is_compiled_after_warm_up(tiny, prompts):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    engine = make_engine(tiny, 24, preemption="swap", swap_bytes=20_000, features=LEAN, programs=Programs())
    engine.warmup()
    check_engine(engine)
    engine.generate([[1]])  # the transfers of a first run
    compiled.clear()
    count = len(engine.programs.compiled)
    random = np.random.default_rng(1)
    for step in range(60):
        if random.random() < 0.5:
            prompt = prompts[random.integers(len(prompts))][: random.integers(1, 50)]
            sampled = SamplingParams(max_tokens=int(random.integers(1, 20)), temperature=float(random.integers(2)), seed=step)
            engine.submit(prompt, sampled)
        if engine._runner.seqs and random.random() < 0.2:
            engine.fork(int(random.choice(list(engine._runner.seqs))), SamplingParams(max_tokens=40))
        engine.step()
    assert engine.stats().preemptions > 0
    assert len(engine.programs.compiled) == count
    assert not compiled
