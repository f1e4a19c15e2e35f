"""The engine against `generate`: whatever is shared, preempted, swapped or forked, each request gets its own tokens."""

import jax
import numpy as np
import pytest
from helpers_engine import LEAN, PROGRAMS, check_engine, make_engine

import jaxpage
from jaxpage import Engine, Features, SamplingParams
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


def test_a_pool_that_fits_one_request_serves_ten_in_turn(tiny, prompts):
    engine = make_engine(tiny, 12, prefix_index="none")
    wanted = ids(jaxpage.generate(tiny, prompts[2:3], SamplingParams(max_tokens=9), block_size=4))
    for _ in range(10):
        assert ids(engine.generate(prompts[2:3], SamplingParams(max_tokens=9))) == wanted
        assert int(engine._device.state.cache.pool.num_free) == 11


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
