"""Prefill and decoding, against the uncached decoder and against themselves under other sizes, orders and companies."""

import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpage
from jaxpage import BatchDecoder, CacheConfig, SamplingParams
from jaxpage.decode import LENGTH
from jaxpage.programs import Programs
from jaxpage.sampling import Sampler
from models import Decoder

generate_module = importlib.import_module("jaxpage.generate")
PROGRAMS = Programs()  # shared by all tests, so that each shape is compiled once
LENGTHS = (1, 2, 15, 16, 17, 5, 31, 9)
PROMPTS = [np.random.default_rng(length).integers(97, size=length).tolist() for length in LENGTHS]
MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


@pytest.fixture(autouse=True)
def _share_programs(monkeypatch):
    monkeypatch.setattr(generate_module, "Programs", lambda: PROGRAMS)


@pytest.fixture(scope="module")
def model(tiny):
    """The tiny decoder with larger weights, so that each token depends on all before it."""
    return jax.tree.map(lambda weight: weight * 8 if weight.ndim == 2 else weight, tiny)


jitted_forward = jax.jit(lambda model, tokens: model(tokens))


def forward(model, rows, width=64):
    """Logits of the uncached decoder for rows of any lengths up to `width`."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return np.asarray(jitted_forward(model, tokens))


def greedy_without_cache(model, prompts, count):
    rows = [list(prompt) for prompt in prompts]
    for _ in range(count):
        logits = forward(model, rows)
        for row, ids in enumerate(rows):
            ids.append(int(np.argmax(logits[row, len(ids) - 1])))
    return [tuple(ids[len(prompt) :]) for ids, prompt in zip(rows, prompts, strict=True)]


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))


@pytest.fixture(scope="module")
def expected(model):
    """What each prompt continues with, from the uncached decoder."""
    return greedy_without_cache(model, PROMPTS, MAX_TOKENS)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def letters(ids):
    """Two letters a token, so that a stop string may begin in the middle of one."""
    return "".join(chr(65 + token // 26) + chr(97 + token % 26) for token in ids)


# Greedy decoding


def test_generate_continues_as_the_uncached_decoder_does(model, expected):
    completions = jaxpage.generate(model, PROMPTS, GREEDY)
    assert tokens_of(completions) == expected
    assert len(set(expected)) == len(expected)
    assert [completion.index for completion in completions] == list(range(8))
    assert [completion.prompt_ids for completion in completions] == [tuple(prompt) for prompt in PROMPTS]
    assert {completion.finish_reason for completion in completions} == {"length"}
    first = completions[0]
    assert (first.text, first.logprobs, first.prompt_logprobs) == (None, None, None)


def test_eight_prompts_at_once_equal_each_alone(model, expected):
    """One row serves all prompts in turn, and each equals its row of the batch."""
    ended = [update.completion for update in BatchDecoder(model, max_seqs=1).run(PROMPTS, GREEDY) if update.completion]
    assert [completion.index for completion in ended] == list(range(8))
    assert tokens_of(ended) == expected


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 256), (4, 64), (64, 16)])
def test_block_sizes_agree(model, expected, block_size, num_blocks):
    assert tokens_of(jaxpage.generate(model, PROMPTS, GREEDY, block_size=block_size, num_blocks=num_blocks)) == expected


def test_order_of_the_prompts_does_not_matter(model, expected):
    order = [6, 0, 3, 7, 1, 5, 2, 4]
    completions = jaxpage.generate(model, [PROMPTS[index] for index in order], GREEDY)
    assert tokens_of(completions) == [expected[index] for index in order]


def test_prompts_longer_than_one_pass_are_prefilled_in_several(model, expected, monkeypatch):
    whole = jaxpage.generate(model, PROMPTS, dataclasses.replace(GREEDY, prompt_logprobs=True))
    monkeypatch.setattr(importlib.import_module("jaxpage.prompt_passes"), "TOKEN_BUCKETS", (8, 16))
    parts = jaxpage.generate(model, PROMPTS, dataclasses.replace(GREEDY, prompt_logprobs=True))
    assert tokens_of(parts) == expected
    for one, other in zip(parts, whole, strict=True):
        assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)


def test_updates_add_up_to_the_completion_whatever_the_round(model, expected):
    decoder = BatchDecoder(model, steps_per_round=5)
    produced, ends = {index: [] for index in range(8)}, {}
    for update in decoder.run(PROMPTS, GREEDY):
        assert update.prompt_index not in ends
        assert len(update.token_ids) <= 5
        produced[update.prompt_index] += update.token_ids
        if update.completion is not None:
            ends[update.prompt_index] = update.completion
    assert [tuple(produced[index]) for index in range(8)] == tokens_of(ends[index] for index in range(8)) == expected
    assert (decoder.stats.tokens, decoder.stats.prompt_tokens) == (8 * MAX_TOKENS, sum(LENGTHS))
    assert decoder.stats.usage.blocks_used == sum(-(-(length + MAX_TOKENS - 1) // 16) for length in LENGTHS)


# The cache beneath


SIZES = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seqs": 4}
PAGED = CacheConfig(**SIZES, num_blocks=33, block_size=4, max_blocks_per_seq=8)
FOUR = [PROMPTS[index] for index in (1, 4, 5, 7)]
LAST = jnp.array([prompt[-1] for prompt in FOUR], jnp.int32)
NO_STOPS = Sampler(
    jnp.full((4, 0), -1, jnp.int32), jnp.zeros(4, jnp.int32), jnp.full(4, 99, jnp.int32), jnp.zeros(4, bool), None, None, None, None
)


def ragged(prompts):
    """Tokens, lengths and starts of prompts without their last tokens."""
    counts = [len(prompt) - 1 for prompt in prompts]
    tokens = np.concatenate([prompt[:-1] for prompt in prompts]).astype(np.int32)
    padded = np.zeros(40, np.int32)
    padded[: len(tokens)] = tokens
    return jnp.asarray(padded), jnp.array(counts, jnp.int32), jnp.array([0, *itertools.accumulate(counts)], jnp.int32)


@functools.partial(jax.jit, static_argnames="implementation")
def decode_all(model, cache, tokens, lengths, starts, last, implementation=None):
    """Eight steps with the log-probability of every token id at each."""
    cache, ok = jaxpage.reserve(cache, lengths)
    cache, _ = jaxpage.prefill(model, cache, tokens, lengths, starts, implementation=implementation)
    state = jaxpage.init_state(cache, NO_STOPS, last, jnp.ones(4, bool))
    state, made, starved = jaxpage.decode_loop(model, state, 8, num_logprobs=97, implementation=implementation)
    return state, made, ok, starved


jitted_step = jax.jit(jaxpage.decode_step)


def decode_four(model, cache, implementation=None):
    state, made, ok, starved = decode_all(model, cache, *ragged(FOUR), LAST, implementation=implementation)
    assert ok.all()
    assert not starved.any()
    jaxpage.check_cache(state.cache)
    return jax.tree.map(np.asarray, made)


def identical(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_where_blocks_lie_changes_not_a_bit(model, expected):
    made = decode_four(model, jaxpage.init_cache(PAGED, "xla"))
    assert made.tokens.tolist() == [list(expected[index][:8]) for index in (1, 4, 5, 7)]
    assert np.isfinite(made.top_logprobs).all()
    cache = jaxpage.init_cache(PAGED, "xla")
    shuffled = jnp.asarray(np.append(np.random.default_rng(0).permutation(np.arange(1, 33)), 0).astype(np.int32))
    identical(made, decode_four(model, cache._replace(pool=cache.pool._replace(free=shuffled))))


def test_what_unwritten_storage_holds_changes_not_a_bit(model):
    made = decode_four(model, jaxpage.init_cache(PAGED, "xla"))
    cache = jaxpage.init_cache(PAGED, "xla")
    for poison in (jnp.nan, jnp.inf):
        storage = jax.tree.map(lambda side, poison=poison: jnp.full_like(side, poison), cache.storage)
        identical(made, decode_four(model, cache._replace(storage=storage)))


def test_contiguous_reservation_gives_the_same_tokens_through_the_same_loop(model):
    config = CacheConfig.contiguous(num_layers=2, num_kv_heads=2, head_dim=8, max_seqs=4, max_length=32)
    cache = jaxpage.init_cache(config, "xla")
    assert jaxpage.supports("contiguous", cache.storage[0], num_heads=4, num_seqs=4, table_width=1, decode=True) == (True, "")
    made = decode_four(model, cache, "contiguous")
    paged = decode_four(model, jaxpage.init_cache(PAGED, "xla"))
    assert made.tokens.tolist() == paged.tokens.tolist()
    np.testing.assert_allclose(made.logprobs, paged.logprobs, atol=1e-4)


def test_steps_one_by_one_equal_the_loop(model):
    made = decode_four(model, jaxpage.init_cache(PAGED, "xla"))
    tokens, lengths, starts = ragged(FOUR)
    cache, _ = jaxpage.reserve(jaxpage.init_cache(PAGED, "xla"), lengths)
    cache, scores = jax.jit(jaxpage.prefill)(model, cache, tokens, lengths, starts)
    assert scores is None
    state = jaxpage.init_state(cache, NO_STOPS, LAST, jnp.array([True, True, False, True]))
    columns = []
    for _ in range(4):
        state, one = jitted_step(model, state)
        columns.append(np.asarray(one.tokens)[:, 0])
    columns = np.stack(columns, axis=1)
    np.testing.assert_array_equal(columns[[0, 1, 3]], made.tokens[[0, 1, 3], :4])
    assert (columns[2] == -1).all()  # a row that is not active
    assert state.num_produced.tolist() == [4, 4, 0, 4]
    assert (state.cache.table.lengths - lengths).tolist() == [4, 4, 0, 4]


def test_a_step_serves_every_row_that_is_not_starved(model):
    """A row that needs no block must not stand still because another, before it, needs one that is not there."""
    cache, ok = jaxpage.reserve(jaxpage.init_cache(PAGED, "xla"), jnp.array([4, 5, 0, 0], jnp.int32))
    assert ok.all()
    cache = cache._replace(pool=cache.pool._replace(num_free=jnp.int32(0)))  # as if others had all the rest
    state = jaxpage.init_state(cache, NO_STOPS, jnp.array([1, 2, 0, 0], jnp.int32), jnp.array([True, True, False, False]))
    state, made = jitted_step(model, state)
    assert state.num_produced.tolist() == [0, 1, 0, 0]
    assert state.cache.table.lengths.tolist() == [4, 6, 0, 0]
    assert (made.tokens[:, 0] >= 0).tolist() == [False, True, False, False]


# Running short


def test_the_loop_ends_before_the_step_that_lacks_a_block_and_says_whose(model):
    """Eight blocks take the prompts and three the first tokens; then the first row comes to the end of its block."""
    made = decode_four(model, jaxpage.init_cache(PAGED, "xla"))
    cache = jaxpage.init_cache(PAGED, "xla")
    cache = cache._replace(pool=cache.pool._replace(num_free=jnp.int32(8 + 3)))
    state, cut, ok, starved = decode_all(model, cache, *ragged(FOUR), LAST)
    assert ok.all()
    assert starved.tolist() == [True, False, False, False]
    assert state.num_produced.tolist() == [3, 3, 3, 3]
    assert state.active.all()
    np.testing.assert_array_equal(cut.tokens[:, :3], made.tokens[:, :3])
    assert (np.asarray(cut.tokens)[:, 3:] == -1).all()


def test_out_of_blocks_ends_one_sequence_and_loses_nothing(model, expected):
    """The others finish with their own tokens, and what the ended one had produced is handed out."""
    decoder = BatchDecoder(model, block_size=4, num_blocks=41)
    done = sorted((update.completion for update in decoder.run(PROMPTS, GREEDY) if update.completion), key=lambda one: one.index)
    reasons = [completion.finish_reason for completion in done]
    assert set(reasons) == {"length", "out_of_blocks"}
    assert reasons.count("out_of_blocks") <= 2
    for completion, tokens in zip(done, expected, strict=True):
        count = len(completion.token_ids)
        assert completion.token_ids == tokens[:count]
        assert (count == MAX_TOKENS) == (completion.finish_reason == "length")
    assert any(completion.finish_reason == "out_of_blocks" and completion.token_ids for completion in done)


def test_prompts_that_do_not_fit_the_pool_together_wait_for_the_batch_before(model, expected):
    decoder = BatchDecoder(model, num_blocks=5)
    once = dataclasses.replace(GREEDY, max_tokens=1)
    done = sorted((update.completion for update in decoder.run(PROMPTS, once) if update.completion), key=lambda one: one.index)
    assert tokens_of(done) == [tokens[:1] for tokens in expected]
    assert {completion.finish_reason for completion in done} == {"length"}
    assert decoder.stats.usage.blocks_used <= 4


def test_a_prompt_as_long_as_the_context_gets_one_token(model):
    long = np.random.default_rng(9).integers(97, size=256).tolist()
    done = jaxpage.generate(model, [long, long[:255]], GREEDY)
    assert [(len(one.token_ids), one.finish_reason) for one in done] == [(1, "length"), (2, "length")]
    logits = forward(model, [long], width=256)
    assert done[0].token_ids[0] == np.argmax(logits[0, 255])
    assert done[1].token_ids[0] == np.argmax(logits[0, 254])


# Stopping


def test_a_stop_id_may_be_the_very_first_token(model, expected):
    params = [dataclasses.replace(GREEDY, stop_ids=(tokens[0],)) for tokens in expected]
    done = jaxpage.generate(model, PROMPTS, params, detokenize=letters)
    assert tokens_of(done) == [tokens[:1] for tokens in expected]
    assert {(completion.finish_reason, completion.text) for completion in done} == {("stop", "")}


def test_the_models_own_end_ends_a_sequence_unless_ignored(model, expected):
    end = expected[2][5]
    params = [dataclasses.replace(GREEDY, ignore_eos=index % 4 != 2) for index in range(8)]
    done = jaxpage.generate(model, PROMPTS, params, eos_ids=(end,), detokenize=letters)
    for completion, one, tokens in zip(done, params, expected, strict=True):
        count = tokens.index(end) if end in tokens and not one.ignore_eos else None
        assert completion.token_ids == (tokens if count is None else tokens[: count + 1])
        assert completion.finish_reason == ("length" if count is None else "stop")
        assert completion.text == letters(tokens[:count])
    assert done[2].finish_reason == "stop"
    ignored = jaxpage.generate(model, PROMPTS, [dataclasses.replace(GREEDY, ignore_eos=index != 3) for index in range(8)], eos_ids=(end,))
    assert ignored[2].token_ids == expected[2]


@pytest.mark.parametrize("steps_per_round", [5, 32])
def test_a_stop_string_may_span_two_tokens(model, expected, steps_per_round):
    """Split over tokens 4 and 5, which a round of five steps also hands out apart."""
    texts = [letters(tokens) for tokens in expected]
    stops = [text[9:11] for text in texts]
    places = [text.find(stop) for text, stop in zip(texts, stops, strict=True)]
    counts = [-(-(place + 2) // 2) for place in places]
    assert 6 in counts
    params = [dataclasses.replace(GREEDY, stop=("never there", stop)) for stop in stops]
    done = jaxpage.generate(model, PROMPTS, params, detokenize=letters, steps_per_round=steps_per_round)
    assert tokens_of(done) == [tokens[:count] for tokens, count in zip(expected, counts, strict=True)]
    assert [one.text for one in done] == [text[:place] for text, place in zip(texts, places, strict=True)]
    assert {one.finish_reason for one in done} == {"stop"}


def test_min_tokens_hold_off_stop_ids_and_stop_strings(model, expected):
    ids = [dataclasses.replace(GREEDY, stop_ids=(tokens[0],), min_tokens=4) for tokens in expected]
    for completion, params in zip(jaxpage.generate(model, PROMPTS, ids), ids, strict=True):
        assert len(completion.token_ids) >= 4
        assert params.stop_ids[0] not in completion.token_ids[:3]
    strings = [dataclasses.replace(GREEDY, stop=(letters(tokens[:1]),), min_tokens=4) for tokens in expected]
    for completion, tokens in zip(jaxpage.generate(model, PROMPTS, strings, detokenize=letters), expected, strict=True):
        assert len(completion.token_ids) >= 4
        assert completion.token_ids == tokens[: len(completion.token_ids)]
        # A stop string that is complete before min_tokens is text like any other.
        assert completion.text.startswith(letters(tokens[:3]))


def test_a_row_that_is_full_ends_for_length(model):
    """The loop must neither stand still nor call the sequence starved."""
    config = dataclasses.replace(PAGED, max_blocks_per_seq=1)
    cache, ok = jaxpage.reserve(jaxpage.init_cache(config, "xla"), jnp.full(4, config.block_size - 2, jnp.int32))
    assert ok.all()
    state = jaxpage.init_state(cache, NO_STOPS, LAST, jnp.ones(4, bool))
    state, made, starved = jax.jit(lambda model, state: jaxpage.decode_loop(model, state, 8))(model, state)
    assert not state.active.any() and not starved.any()
    assert state.finish.tolist() == [LENGTH] * 4
    assert state.num_produced.tolist() == [2] * 4
    assert (np.asarray(made.tokens)[:, 2:] == -1).all()


def test_each_sequence_has_its_own_end(model, expected):
    params = [dataclasses.replace(GREEDY, max_tokens=1 + index) for index in range(7)] + [GREEDY]
    assert tokens_of(jaxpage.generate(model, PROMPTS, params)) == [
        tokens[: one.max_tokens] for tokens, one in zip(expected, params, strict=True)
    ]


# Log-probabilities


def test_prompt_log_probabilities_are_the_uncached_decoders(model):
    done = jaxpage.generate(model, PROMPTS, [dataclasses.replace(GREEDY, prompt_logprobs=index != 3) for index in range(8)])
    scores = log_softmax(forward(model, PROMPTS))
    for row, (completion, prompt) in enumerate(zip(done, PROMPTS, strict=True)):
        if row == 3:
            assert completion.prompt_logprobs is None
            continue
        assert completion.prompt_logprobs[0] is None
        wanted = [scores[row, place, token] for place, token in enumerate(prompt[1:])]
        assert list(completion.prompt_logprobs[1:]) == pytest.approx(wanted, abs=1e-4)


def test_log_probabilities_and_the_best_alternatives_are_the_uncached_decoders(model, expected):
    """Of the model itself: bias and penalties choose another token, and change no log-probability."""
    params = [dataclasses.replace(GREEDY, logprobs=(None, 0, 2, 3)[index % 4], logit_bias={7: 4.0}) for index in range(8)]
    done = jaxpage.generate(model, PROMPTS, params)
    assert tokens_of(done) != expected
    scores = log_softmax(forward(model, [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, done, strict=True)]))
    for row, (completion, one) in enumerate(zip(done, params, strict=True)):
        if one.logprobs is None:
            assert completion.logprobs is None
            continue
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
        for step, entry in enumerate(completion.logprobs):
            here = scores[row, len(PROMPTS[row]) - 1 + step]
            assert entry.logprob == pytest.approx(here[entry.token_id], abs=1e-4)
            assert [token for token, _ in entry.top] == np.argsort(-here, kind="stable")[: one.logprobs].tolist()
            assert [value for _, value in entry.top] == pytest.approx(np.sort(here)[::-1][: one.logprobs].tolist(), abs=1e-4)


# Sampling


def test_a_seeded_sequence_does_not_depend_on_its_mates(model):
    mine = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.1, seed=1234)
    alone = jaxpage.generate(model, [PROMPTS[4]], mine, num_blocks=64)[0].token_ids
    mates = [
        GREEDY,
        SamplingParams(max_tokens=3, temperature=1.0),
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=5),
        SamplingParams(max_tokens=MAX_TOKENS, repetition_penalty=1.5, presence_penalty=0.2, frequency_penalty=0.1),
        mine,
        SamplingParams(max_tokens=MAX_TOKENS, temperature=2.0, seed=1234),
        SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, logit_bias={4: 1.0, 9: -3.0}, stop_ids=(4, 5)),
        GREEDY,
    ]
    assert jaxpage.generate(model, PROMPTS, mates)[4].token_ids == alone
    # In another row, after another wait, with other lengths around it.
    order = [7, 6, 5, 3, 2, 1, 0, 4]
    again = jaxpage.generate(model, [PROMPTS[index] for index in order], [mates[index] for index in order])
    assert again[7].token_ids == alone
    assert jaxpage.generate(model, [PROMPTS[4]], dataclasses.replace(mine, seed=1235), num_blocks=64)[0].token_ids != alone


def test_penalties_count_the_prompt_and_what_was_produced(model):
    done = jaxpage.generate(model, PROMPTS, dataclasses.replace(GREEDY, frequency_penalty=1e6, repetition_penalty=1.0001))
    for completion in done:
        assert len(set(completion.token_ids)) == MAX_TOKENS


# Refusals


@pytest.mark.parametrize(
    ("prompts", "params", "options", "message"),
    [
        ([[1], []], GREEDY, {}, "prompt 1 is empty; a prompt needs at least one token"),
        ([[1], [3, 97]], GREEDY, {}, "prompt 1 holds a token id outside the vocabulary of 97"),
        ([[-1]], GREEDY, {}, "prompt 0 holds a token id outside the vocabulary of 97"),
        ([[1] * 257], GREEDY, {}, "prompt 0 has 257 tokens, the model's context holds 256"),
        ([[1], [1] * 9], GREEDY, {"block_size": 4, "num_blocks": 3}, r"prompt 1 needs 4 blocks of 4 tokens .* the pool has 3"),
        ([[1], [2]], [GREEDY], {}, "params must be one SamplingParams or one for each of the 2 prompts, got 1"),
        ([[1]], SamplingParams(stop=("a",)), {}, "stop strings need a detokenizer"),
        ([[1]], SamplingParams(stop_ids=(97,)), {}, "token id 97 in logit_bias or stop_ids is outside the vocabulary of 97"),
        ([[1]], SamplingParams(logprobs=98), {}, "logprobs"),
        ([[1]], GREEDY, {"cache_dtype": "float64"}, "dtype must be one of"),
        ([[1]], GREEDY, {"block_size": 0}, "block_size must be at least 1, got 0"),
        ([[1]], GREEDY, {"max_seqs": 0}, "max_seqs must be at least 1, got 0"),
        ([[1]], GREEDY, {"steps_per_round": 0}, "steps_per_round must be at least 1, got 0"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_produced(model, prompts, params, options, message):
    with pytest.raises(ValueError, match=message):
        jaxpage.generate(model, prompts, params, **options)


@pytest.mark.parametrize("fault", [{"stop_ids": (97,)}, {"logit_bias": {97: 1.0}}, {"logprobs": 98}])
def test_a_fault_of_a_later_prompt_is_refused_before_the_first_has_run(model, fault):
    """Else what was produced would be lost with the error."""
    decoder = BatchDecoder(model, max_seqs=1)
    with pytest.raises(ValueError, match=r"97|98"):
        next(decoder.run([[1], [2]], [GREEDY, dataclasses.replace(GREEDY, **fault)]))


def test_no_prompts_give_no_completions(model):
    assert jaxpage.generate(model, []) == []


# Programs


def test_lengths_inside_a_bucket_compile_nothing_new(model, expected):
    jaxpage.generate(model, PROMPTS, GREEDY)
    known = set(PROGRAMS.compiled)
    prompts = [PROMPTS[6][: 5 + index] for index in range(7)] + [PROMPTS[6]]
    done = jaxpage.generate(model, prompts, dataclasses.replace(GREEDY, max_tokens=10))
    assert set(PROGRAMS.compiled) == known
    assert done[7].token_ids == expected[6][:10]


def test_the_loop_compiles_once_and_moves_nothing_between_host_and_device(model):
    compiled = []

    def note(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    loop = jax.jit(lambda model, state: jaxpage.decode_loop(model, state, 4), donate_argnums=1)
    made = []
    for lengths in ((1, 9, 3, 4), (0, 0, 0, 0), (12, 7, 8, 15)):
        cache, _ = jaxpage.reserve(jaxpage.init_cache(PAGED, "xla"), jnp.array(lengths, jnp.int32))
        state = jaxpage.init_state(cache, jax.tree.map(jnp.copy, NO_STOPS), jnp.arange(4, dtype=jnp.int32), jnp.ones(4, bool))
        jax.block_until_ready(state)
        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            with jax.transfer_guard("disallow"):
                state, tokens, _ = loop(model, state)
        finally:
            jax.monitoring.unregister_event_duration_listener(note)
        assert state.num_produced.tolist() == [4, 4, 4, 4]
        made.append(tokens.tokens.tolist())
        assert len(compiled) == 1
    assert made[0] != made[1]


def test_the_loop_works_in_the_donated_pool_and_holds_no_copy_of_it(model):
    config = CacheConfig(**(SIZES | {"max_seqs": 8}), num_blocks=4096, block_size=16, max_blocks_per_seq=64)
    state = jax.eval_shape(
        lambda: jaxpage.init_state(
            jaxpage.init_cache(config, "xla"),
            Sampler(
                jnp.zeros((8, 1), jnp.int32), jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.int32), jnp.zeros(8, bool), None, None, None, None
            ),
            jnp.zeros(8, jnp.int32),
            jnp.zeros(8, bool),
        )
    )
    assert config.pool_bytes > 20 * sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    loop = jax.jit(lambda model, state: jaxpage.decode_loop(model, state, 32), donate_argnums=1)
    memory = loop.lower(model, state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < config.pool_bytes / 10
    assert memory.alias_size_in_bytes >= config.pool_bytes


# The decoder


def test_sliding_windows_agree_with_the_uncached_decoder(tiny):
    """Windows smaller than a block of four, equal to it, and no multiple of it, beside a layer that sees all."""
    config = dataclasses.replace(tiny.config, num_layers=4, windows=(3, 4, 6, None))
    model = jax.tree.map(lambda weight: weight * 8 if weight.ndim == 2 else weight, Decoder(config, rngs=nnx.Rngs(1)))
    expected = greedy_without_cache(model, PROMPTS, 8)
    params = SamplingParams(max_tokens=8, prompt_logprobs=True)
    done = jaxpage.generate(model, PROMPTS, params, block_size=4)
    assert tokens_of(done) == expected
    scores = log_softmax(forward(model, PROMPTS))
    for row, (completion, prompt) in enumerate(zip(done, PROMPTS, strict=True)):
        wanted = [scores[row, place, token] for place, token in enumerate(prompt[1:])]
        assert list(completion.prompt_logprobs[1:]) == pytest.approx(wanted, abs=1e-4)


def test_the_uncached_decoder_trains(tiny):
    tokens = jnp.asarray(np.random.default_rng(2).integers(97, size=(4, 16)), jnp.int32)

    @jax.jit
    def step(model):
        def loss(model):
            logits = model(tokens[:, :-1])
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))

        value, grads = jax.value_and_grad(loss)(model)
        return value, grads, jax.tree.map(lambda weight, grad: weight - 0.5 * grad, model, grads)

    losses, model = [], tiny
    for _ in range(6):
        value, grads, model = step(model)
        losses.append(float(value))
        for leaf in jax.tree.leaves(grads):
            assert np.isfinite(np.asarray(leaf)).all()
            assert np.asarray(leaf).any()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
