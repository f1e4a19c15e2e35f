"""Constrained output: masks on the host, their faults, and grammars."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers_engine import PROGRAMS, check_engine

from jaxpage import Engine, EngineOptions, Features, SamplingParams

PROMPT = [5, 6, 7, 8, 9]
FEATURES = Features(random=False, truncated=False, penalised=False, num_biases=0, num_stop_ids=1, num_logprobs=None, constrained=True)
OPTIONS = EngineOptions(num_blocks=9, block_size=4, max_seqs=2, max_length=32, tokens_per_pass=16, steps_per_round=4, features=FEATURES)
PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def model(tiny):
    """The tiny decoder with larger weights, so that each token depends on all before it."""
    return jax.tree.map(lambda weight: weight * 8 if weight.ndim == 2 else weight, tiny)


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, OPTIONS, eos_ids=[3], programs=PROGRAMS)


def run(engine):
    """Runs all requests to their ends; the completions by name."""
    done = {}
    for _ in range(200):
        for update in engine.step():
            if update.completion is not None:
                done[update.prompt_index] = update.completion
        if not engine.unfinished:
            break
    assert not engine.unfinished
    check_engine(engine)
    return done


def only(*ids):
    """A mask of a few ids, as booleans."""
    mask = np.zeros(97, bool)
    mask[list(ids)] = True
    return mask


def as_words(mask):
    words = np.zeros(4, np.uint32)
    for token in np.flatnonzero(mask):
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words


def by_place(produced):
    """Two ids that depend on how many tokens there are, at both ends of words."""
    return only((31, 32, 64, 96, 0)[len(produced) % 5], 10 + len(produced))


def greedy(model, prompt, allowed_tokens, count):
    """The best allowed token at each step, from the uncached decoder."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(uncached(model, padded))[0, len(tokens) - 1]
        tokens.append(int(np.argmax(np.where(allowed_tokens(tokens[len(prompt) :]), logits, -np.inf))))
    return tuple(tokens[len(prompt) :])


uncached = jax.jit(lambda model, tokens: model(tokens))


def test_the_best_allowed_token_is_chosen_and_others_choose_freely(engine, model):
    calls = []

    def allowed_tokens(produced):
        calls.append(tuple(produced))
        return by_place(produced)

    constrained = engine.submit(PROMPT, PARAMS, allowed_tokens=allowed_tokens)
    free = engine.submit(PROMPT[::-1], PARAMS)
    done = run(engine)
    wanted = greedy(model, PROMPT, by_place, 8)
    assert done[constrained].token_ids == wanted
    assert done[free].token_ids == greedy(model, PROMPT[::-1], lambda _: np.ones(97, bool), 8)
    assert calls == [wanted[:count] for count in range(8)]  # once for each token


def test_the_row_of_a_constrained_request_is_free_of_its_mask_afterwards(engine, model):
    engine.submit(PROMPT, PARAMS, allowed_tokens=by_place)
    run(engine)
    (done,) = engine.generate([PROMPT], PARAMS)
    assert done.token_ids == greedy(model, PROMPT, lambda _: np.ones(97, bool), 8)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_words_of_bits_are_the_same_as_booleans(engine, model, dtype):
    name = engine.submit(PROMPT, PARAMS, allowed_tokens=lambda produced: as_words(by_place(produced)).view(dtype))
    assert run(engine)[name].token_ids == greedy(model, PROMPT, by_place, 8)


@pytest.mark.parametrize("empty", [only(), as_words(only()), np.array([0, 0, 0, 1 << 5], np.uint32)])
def test_a_mask_that_allows_nothing_ends_its_request_alone(engine, model, empty):
    """The last of the masks has a bit beyond the vocabulary."""
    full = np.full(4, -1, np.int32) if empty.dtype == np.uint32 else only(*range(97))
    at_once = engine.submit(PROMPT, PARAMS, allowed_tokens=lambda _: empty)
    later = engine.submit(PROMPT, PARAMS, allowed_tokens=lambda produced: full if len(produced) < 3 else empty)
    free = engine.submit(PROMPT, PARAMS)
    done = run(engine)
    tokens = greedy(model, PROMPT, lambda _: np.ones(97, bool), 8)
    assert [done[name].token_ids for name in (at_once, later, free)] == [(), tokens[:3], tokens]
    assert [done[name].finish_reason for name in (at_once, later, free)] == ["no_allowed_token", "no_allowed_token", "length"]


def test_only_a_stop_id_before_min_tokens_is_nothing(engine):
    params = dataclasses.replace(PARAMS, min_tokens=2)
    ends = engine.submit(PROMPT, PARAMS, allowed_tokens=lambda _: only(3))
    barred = engine.submit(PROMPT, params, allowed_tokens=lambda _: only(3))
    done = run(engine)
    assert (done[ends].token_ids, done[ends].finish_reason) == ((3,), "stop")
    assert (done[barred].token_ids, done[barred].finish_reason) == ((), "no_allowed_token")


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (np.ones(96, bool), r"bool of shape \(96,\)"),
        (np.ones(97, np.float32), r"float32 of shape \(97,\)"),
        (np.ones(3, np.uint32), r"uint32 of shape \(3,\)"),
        ([True] * 97, r"\[True, "),
    ],
)
def test_what_is_no_mask_is_named_and_others_go_on_after_an_abort(engine, model, mask, given):
    bad = engine.submit(PROMPT, PARAMS, allowed_tokens=lambda produced: mask if produced else only(1))
    free = engine.submit(PROMPT, PARAMS)
    message = rf"allowed_tokens of request {bad} must return an array of bool of shape \(97,\) or of int32 .* shape \(4,\), got {given}"
    with pytest.raises(ValueError, match=message):
        run(engine)
    with pytest.raises(ValueError, match=message):
        engine.step()
    assert engine.abort(bad).token_ids == (1,)
    assert run(engine)[free].token_ids == greedy(model, PROMPT, lambda _: np.ones(97, bool), 8)


def test_the_feature_must_be_on(model):
    options = dataclasses.replace(OPTIONS, features=dataclasses.replace(FEATURES, constrained=False))
    with pytest.raises(ValueError, match="allowed_tokens cannot be used here: the feature 'constrained' is off"):
        Engine(model, options).submit(PROMPT, PARAMS, allowed_tokens=by_place)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_and_forked_requests_keep_their_masks(model, preemption):
    """Eight blocks for two sequences that come to need six each."""
    options = dataclasses.replace(OPTIONS, preemption=preemption, swap_bytes=1 << 20, prefix_index="none")
    engine = Engine(model, options, programs=PROGRAMS)
    params = dataclasses.replace(PARAMS, max_tokens=18)
    names = [engine.submit(PROMPT, params, allowed_tokens=by_place) for _ in range(2)]
    while not engine.stats().tokens:
        engine.step()
    names.append(engine.fork(names[0], params))
    done = run(engine)
    assert engine.stats().preemptions > 0
    wanted = greedy(model, PROMPT, by_place, 18)
    assert [done[name].token_ids for name in names] == [wanted] * 3
