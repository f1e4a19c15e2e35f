"""Choosing tokens: each rule against its plain formula, and what a draw may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage import SamplingParams, sample
from jaxpage.sampler_arrays import Features, build_sampler
from jaxpage.sampling import Truncation, _inverse_cdf, count_tokens, keep_top, score_tokens

VOCABULARY = 23

jitted_sample = jax.jit(sample)
jitted_keep_top = jax.jit(keep_top)
jitted_inverse_cdf = jax.jit(_inverse_cdf)


def sampler_of(*requests, prompts=None, produced=None, eos_ids=(), num_seqs=None, vocab_size=VOCABULARY):
    sampler = build_sampler(
        requests,
        prompts or [[0]] * len(requests),
        Features.of(requests, eos_ids),
        num_seqs=num_seqs or len(requests),
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        max_tokens=[one.max_tokens for one in requests],
    )
    for row, tokens in enumerate(produced or []):
        for token in tokens:
            counted = jnp.arange(sampler.max_tokens.shape[0]) == row
            sampler = count_tokens(sampler, jnp.full_like(sampler.max_tokens, token), counted)
    return sampler


def choose(logits, sampler, lengths=None, num_produced=None):
    rows = logits.shape[0]
    lengths = np.full(rows, 5) if lengths is None else lengths
    num_produced = np.zeros(rows) if num_produced is None else num_produced
    return np.asarray(
        jitted_sample(jnp.asarray(logits, jnp.float32), sampler, jnp.asarray(lengths, jnp.int32), jnp.asarray(num_produced, jnp.int32))
    )


def draws(logits, params, count):
    """Tokens that so many seeds draw from one row of logits."""
    one = sampler_of(params, vocab_size=len(logits))
    sampler = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape[1:])), one)
    sampler = sampler._replace(randomness=sampler.randomness._replace(seed=jnp.arange(count, dtype=jnp.uint32)))
    return choose(np.broadcast_to(logits, (count, len(logits))), sampler)


def softmax(scores):
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return weights / weights.sum()


# Greedy


def test_greedy_takes_the_lowest_id_of_equal_scores():
    logits = np.full((4, VOCABULARY), -1.0)
    logits[0, [7, 3, 20]] = 2.5
    logits[1, [22, 21]] = 0.0
    logits[2, [5, 9]] = -0.0, 0.0  # equal as numbers
    greedy = [SamplingParams()] * 4
    assert choose(logits, sampler_of(*greedy)).tolist() == [3, 21, 5, 0]
    # The same among rows that sample, where the greedy ones take another path.
    mixed = sampler_of(*greedy[:3], SamplingParams(temperature=1.0, top_k=3))
    assert choose(logits, mixed)[:3].tolist() == [3, 21, 5]


def test_a_nearly_cold_draw_is_greedy():
    """Dividing by a tiny temperature must not overflow into NaN."""
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)) * 30
    for temperature in (1e-4, 1e-20, 1e-37):
        sampler = sampler_of(*[SamplingParams(temperature=temperature)] * 3)
        assert choose(logits, sampler).tolist() == np.argmax(logits, axis=-1).tolist(), temperature


# Truncation


def keep_top_reference(scores, top_k, top_p, min_p):
    """What must and what may be kept, by sorting in float64: sums in float32 may fall on either side of a threshold."""
    scores = np.asarray(scores, np.float32).astype(np.float64)
    kept = scores >= (np.sort(scores)[::-1][min(top_k, len(scores)) - 1] if top_k else -np.inf)
    weights = np.where(kept, np.exp(np.maximum(scores - scores.max(), -800)), 0.0)
    # A token is in while the sum of all that score higher falls short of top_p.
    above = np.array([weights[scores > score].sum() for score in scores]) / weights.sum()

    def keep(slack):
        nucleus = (above < np.float32(top_p) + slack) | (top_p == 1) | (scores == scores.max())
        return kept & nucleus & (weights >= np.float32(min_p) * (1 - slack))

    return keep(-2e-6), keep(2e-6)


ordinary = st.floats(-30, 30, width=32)
tied = st.integers(-3, 3).map(float)
extreme = st.sampled_from([-3e38, -1e30, -1e20, -100.0, -1e-30, 0.0, 1e-30, 80.0, 1e20, 3e38])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    scores=st.one_of(
        *[st.lists(values, min_size=VOCABULARY, max_size=VOCABULARY) for values in (ordinary, tied, st.one_of(tied, extreme))]
    ),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.one_of(st.just(1.0), st.floats(2.0**-7, 1.0, width=32), st.sampled_from([1e-6, 0.5, 0.999])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
)
def test_truncation_keeps_what_sorting_would(scores, top_k, top_p, min_p):
    truncation = Truncation(jnp.array([top_k], jnp.int32), jnp.array([top_p], jnp.float32), jnp.array([min_p], jnp.float32))
    kept = np.asarray(jitted_keep_top(jnp.array([scores], jnp.float32), truncation))[0]
    least, most = keep_top_reference(scores, top_k, top_p, min_p)
    assert kept.any()
    assert not (least & ~kept).any(), "a token that belongs in is out"
    assert not (kept & ~most).any(), "a token that belongs out is in"


def test_equal_scores_at_a_threshold_are_all_kept():
    scores = jnp.array([[1.0, 0.0, 3.0, -0.0, 0.0, -2.0]])
    for top_k, expected in ((1, [2]), (2, [0, 2]), (3, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4, 5])):
        kept = keep_top(scores, Truncation(jnp.array([top_k], jnp.int32), jnp.ones(1), jnp.zeros(1)))
        assert np.flatnonzero(kept[0]).tolist() == expected


def test_top_p_counts_among_what_top_k_left():
    scores = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # Of the two best, 0.4 / 0.7 alone reaches 0.55; of all four it would take two.
    both = keep_top(scores, Truncation(jnp.array([2], jnp.int32), jnp.array([0.55]), jnp.zeros(1)))
    alone = keep_top(scores, Truncation(jnp.array([0], jnp.int32), jnp.array([0.55]), jnp.zeros(1)))
    assert (np.flatnonzero(both[0]).tolist(), np.flatnonzero(alone[0]).tolist()) == ([0], [0, 1])


def test_rows_are_truncated_each_by_its_own_values():
    scores = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]] * 4))
    truncation = Truncation(jnp.array([1, 0, 0, 0], jnp.int32), jnp.array([1.0, 0.6, 1.0, 1.0]), jnp.array([0.0, 0.0, 0.45, 0.0]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(keep_top(scores, truncation))] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


# Drawing


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0), range(8)),
        (SamplingParams(temperature=0.5), range(8)),
        (SamplingParams(temperature=2.0, top_k=3), [1, 4, 6]),
        (SamplingParams(temperature=1.0, top_p=0.7), [1, 4]),
        (SamplingParams(temperature=1.0, min_p=0.1), [1, 2, 4, 6]),
    ],
)
def test_draws_follow_the_truncated_softmax(params, kept):
    probabilities = np.array([0.02, 0.4, 0.06, 0.03, 0.32, 0.01, 0.13, 0.03])
    logits = np.log(probabilities)
    expected = np.where(np.isin(np.arange(8), list(kept)), softmax(logits / params.temperature), 0.0)
    expected /= expected.sum()
    count = 20_000
    seen = np.bincount(draws(logits, params, count), minlength=8)
    assert not seen[expected == 0].any()
    live = expected > 0
    statistic = float(np.sum((seen[live] - count * expected[live]) ** 2 / (count * expected[live])))
    # Mean n, variance 2n for n degrees of freedom; the seeds are fixed, so this never flickers.
    assert statistic < live.sum() + 4 * np.sqrt(2 * live.sum())


def test_a_vocabulary_of_many_tiles_is_drawn_from_evenly():
    size = 1000  # four tiles, the last of them padded
    tokens = draws(np.zeros(size), SamplingParams(temperature=1.0), 50_000)
    assert tokens.min() >= 0
    assert tokens.max() < size
    for part in (np.bincount(tokens // 100, minlength=10), np.bincount(tokens % 10, minlength=10)):
        assert np.sum((part - 5000.0) ** 2 / 5000) < 10 + 4 * np.sqrt(20)


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, VOCABULARY))
    mine = SamplingParams(temperature=1.3, seed=77)
    positions = np.arange(40)

    alone = [int(choose(logits[:1], sampler_of(mine), lengths=[place])[0]) for place in positions]
    mates = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1, top_k=4, logit_bias={3: 2.0}),
        SamplingParams(temperature=1.0, seed=2, min_p=0.2, repetition_penalty=1.3, presence_penalty=0.5, stop_ids=(4,), min_tokens=2),
    ]
    batch = sampler_of(*mates, mine, num_seqs=4)
    order = logits[[1, 2, 3, 0]]
    mixed = [int(choose(order, batch, lengths=[9, 2 * place, 7, place], num_produced=[1, 2, 3, 4])[3]) for place in positions]
    assert alone == mixed
    assert len(set(alone)) > 5  # another position, another draw
    other = [int(choose(logits[:1], sampler_of(SamplingParams(temperature=1.3, seed=78)), lengths=[place])[0]) for place in positions]
    assert other != alone


def test_the_largest_seed_is_its_own_stream():
    logits = np.zeros((3, VOCABULARY))
    seeds = (2**32 - 1, 2**31, 0)
    sampler = sampler_of(*[SamplingParams(temperature=1.0, seed=seed) for seed in seeds])
    streams = np.array([choose(logits, sampler, lengths=[place] * 3) for place in range(30)]).T
    assert len({tuple(stream) for stream in streams}) == 3


EDGES = (0.0, float(np.float32(1) - np.float32(2) ** -24), 0.5, float(np.float32(1) - np.float32(2) ** -23), 2.0**-24)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_no_token_of_probability_zero_is_ever_drawn(data, seed):
    size = 9 * 256 - 100
    rng = np.random.default_rng(seed)
    share = data.draw(st.sampled_from([0.001, 0.01, 0.3, 1.0]), label="share of tokens with a probability")
    spread = data.draw(st.sampled_from([0.0, 1.0, 20.0]), label="spread")
    weights = np.exp(rng.normal(size=(len(EDGES) + 3, size)) * spread) * (rng.random((len(EDGES) + 3, size)) < share)
    weights[:, data.draw(st.integers(0, size - 1), label="token that is always there")] += 1e-3
    probabilities = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    probabilities[probabilities < 1e-37] = 0.0  # devices flush the smallest numbers to 0
    uniform = np.array([*EDGES, *rng.random(3)], np.float32)
    uniform = np.where(uniform < 1, uniform, np.float32(0))
    tokens = np.asarray(jitted_inverse_cdf(jnp.asarray(probabilities), jnp.asarray(uniform)))
    assert (tokens < size).all()
    assert (np.take_along_axis(probabilities, tokens[:, None], axis=1) > 0).all()
    assert tokens[0] == np.flatnonzero(probabilities[0])[0]  # uniform 0 falls into the first share


def test_the_inverse_cdf_splits_the_unit_interval_by_shares():
    probabilities = np.zeros((1, 600), np.float32)
    probabilities[0, [3, 255, 256, 599]] = 0.25, 0.125, 0.5, 0.125
    for uniform, token in ((0.0, 3), (0.2499, 3), (0.25, 255), (0.3749, 255), (0.375, 256), (0.8749, 256), (0.875, 599), (EDGES[1], 599)):
        drawn = _inverse_cdf(jnp.asarray(probabilities), jnp.array([uniform], jnp.float32))
        assert int(drawn[0]) == token, uniform


def test_the_last_share_is_drawn_where_rounding_leaves_the_goal_past_it():
    probabilities = np.full((1, 1024), 1e-8, np.float32)
    probabilities[0, 0] = 1.0
    probabilities[0, 1000:] = 0.0
    token = int(_inverse_cdf(jnp.asarray(probabilities), jnp.array([EDGES[1]], jnp.float32))[0])
    assert probabilities[0, token] > 0


def test_no_token_of_probability_zero_is_drawn_from_a_large_vocabulary():
    """A parallel cumulative sum of this length may fall where the next share is 0; goals at every share's end find such places."""
    size = 151_936
    shared = jax.jit(lambda row, goals: jax.vmap(lambda goal: _inverse_cdf(row[None], goal[None])[0])(goals))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        row = np.zeros(size, np.float32)
        places = np.flatnonzero(rng.random(size // 256) < 0.5) * 256 + 17  # one token in every other run of 256
        row[places] = softmax(rng.normal(size=len(places)) * 2)
        ends = np.cumsum(row, dtype=np.float64)[places] / np.sum(row, dtype=np.float64)
        goals = (ends[:, None] * (1 + np.arange(-8, 9) * 2.0**-24)).astype(np.float32).reshape(-1)
        goals = goals[goals < 1]
        tokens = np.asarray(shared(row, goals))
        assert (row[np.minimum(tokens, size - 1)] > 0).all(), f"seed {seed}"


# Penalties, bias, bars


def penalised(logits, params, prompt, produced):
    """The published formulas, one token at a time in float64."""
    scores = np.asarray(logits, np.float64).copy()
    for token, value in params.logit_bias.items():
        scores[token] += value
    for token in {*prompt, *produced}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in produced:
        scores[token] -= params.frequency_penalty
    for token in set(produced):
        scores[token] -= params.presence_penalty
    return scores


@pytest.mark.parametrize(
    "effects", [("repetition",), ("presence",), ("frequency",), ("bias",), ("repetition", "presence", "frequency", "bias")]
)
def test_penalties_and_bias_follow_their_formulas(effects):
    rng = np.random.default_rng(len(effects))
    rows, steps = 300, 6
    logits = rng.normal(size=(rows, VOCABULARY)).astype(np.float32)
    prompts = rng.integers(VOCABULARY, size=(rows, 5)).tolist()
    produced = rng.integers(VOCABULARY, size=(rows, steps)) // 2  # many a token more than once
    requests = [
        SamplingParams(
            repetition_penalty=float(rng.choice([0.5, 1.0, 1.3, 2.0])) if "repetition" in effects else 1.0,
            presence_penalty=float(rng.choice([-1.0, 0.0, 0.7])) if "presence" in effects else 0.0,
            frequency_penalty=float(rng.choice([-0.3, 0.0, 0.4])) if "frequency" in effects else 0.0,
            logit_bias={int(token): float(rng.normal()) for token in rng.integers(VOCABULARY, size=4)} if "bias" in effects else {},
        )
        for _ in range(rows)
    ]
    sampler = sampler_of(*requests, prompts=prompts)
    for tokens in produced.T:
        sampler = count_tokens(sampler, jnp.asarray(tokens, jnp.int32), jnp.ones(rows, bool))
    expected = np.stack([penalised(*row) for row in zip(logits, requests, prompts, produced.tolist(), strict=True)])
    best = np.sort(expected, axis=-1)
    clear = best[:, -1] - best[:, -2] > 1e-5
    assert clear.sum() > rows * 0.9
    assert (np.argmax(expected, axis=-1) != np.argmax(logits, axis=-1)).sum() > rows / 20  # the effects do matter
    np.testing.assert_array_equal(choose(logits, sampler)[clear], np.argmax(expected, axis=-1)[clear])


def test_each_row_counts_its_own_tokens():
    logits = np.zeros((2, VOCABULARY))
    logits[:, 3], logits[:, 8] = 1.0, 0.9
    sampler = sampler_of(*[SamplingParams(frequency_penalty=0.2)] * 2, produced=[[3], [8]])
    assert choose(logits, sampler).tolist() == [8, 3]


def test_tokens_of_rows_that_did_not_run_are_not_counted():
    sampler = sampler_of(*[SamplingParams(presence_penalty=1.0)] * 2)
    sampler = count_tokens(sampler, jnp.array([3, 3], jnp.int32), jnp.array([True, False]))
    assert np.asarray(sampler.penalties.produced).sum(axis=1).tolist() == [1, 0]


def test_stop_ids_are_barred_until_min_tokens():
    logits = np.zeros((4, VOCABULARY))
    logits[:, 6], logits[:, 11], logits[:, 12] = 3.0, 2.0, 1.0
    requests = [
        SamplingParams(min_tokens=3, stop_ids=(6,)),
        SamplingParams(min_tokens=3, stop_ids=(6,), ignore_eos=True),
        SamplingParams(min_tokens=2, stop_ids=(6,)),
        SamplingParams(stop_ids=(6,)),
    ]
    sampler = sampler_of(*requests, eos_ids=(11,))
    assert choose(logits, sampler, num_produced=[2, 2, 2, 0]).tolist() == [12, 11, 6, 6]
    hot = sampler_of(*[SamplingParams(temperature=5.0, min_tokens=9, stop_ids=(6,))] * 4, eos_ids=(11,))
    seen = {token for place in range(40) for token in choose(logits, hot, lengths=[place] * 4, num_produced=[8] * 4).tolist()}
    assert not seen & {6, 11}
    assert len(seen) > 5


def test_a_banned_token_is_never_drawn():
    logits = np.zeros((1, 8))
    tokens = draws(logits[0], SamplingParams(temperature=1.0, logit_bias={2: -100.0, 5: -100.0}), 2000)
    assert sorted(set(tokens.tolist())) == [0, 1, 3, 4, 6, 7]


# Log-probabilities


def test_log_probabilities_are_those_of_the_scores_given():
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(5, VOCABULARY)) * 10).astype(np.float32)
    tokens = np.array([0, 22, 7, 7, 3])
    expected = np.log(np.stack([softmax(row) for row in logits]))[np.arange(5), tokens]
    np.testing.assert_allclose(score_tokens(jnp.asarray(logits), jnp.asarray(tokens)), expected, rtol=1e-5)


# What is built


def test_only_what_a_request_uses_is_built():
    plain = sampler_of(SamplingParams(top_k=5, top_p=0.5, min_p=0.1))  # greedy: truncation has nothing to do
    assert (plain.randomness, plain.penalties, plain.bias) == (None, None, None)
    random = sampler_of(SamplingParams(temperature=1.0))
    assert random.randomness.truncation is None
    assert sampler_of(SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, min_p=0.1)).randomness.truncation is not None
    assert sampler_of(SamplingParams(presence_penalty=-0.5)).penalties is not None
    assert sampler_of(SamplingParams(logit_bias={1: 1.0, 2: 2.0}), SamplingParams()).bias.ids.tolist() == [[1, 2], [-1, -1]]


def test_padding_rows_are_greedy_and_unchanged():
    sampler = sampler_of(SamplingParams(temperature=1.0, logit_bias={3: 9.0}, presence_penalty=2.0, top_k=2), num_seqs=2)
    logits = np.zeros((2, VOCABULARY))
    logits[1, 6] = 1.0
    assert choose(logits, sampler)[1] == 6


def test_a_stop_id_named_twice_counts_once():
    sampler = sampler_of(SamplingParams(stop_ids=(4, 4, 9)), eos_ids=(9, 2))
    assert sampler.stop_ids.tolist() == [[4, 9, 2]]


# Refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 0.5}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"min_p": -0.01}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ("",)}, "stop strings must not be empty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1025}, "logprobs"),
        ({"logprobs": 1.5}, "logprobs"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_values_at_the_bounds_are_taken():
    SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0, top_k=0, top_p=1.0, min_p=1.0, repetition_penalty=1e-3, seed=2**32 - 1, logprobs=0
    )


@pytest.mark.parametrize("values", [{"logit_bias": {VOCABULARY: 1.0}}, {"stop_ids": (VOCABULARY,)}, {"stop_ids": (-1,)}])
def test_token_ids_outside_the_vocabulary_are_refused(values):
    with pytest.raises(ValueError, match=rf"token id .* in logit_bias or stop_ids is outside the vocabulary of {VOCABULARY}"):
        sampler_of(SamplingParams(**values))
