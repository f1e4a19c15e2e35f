"""Speculative decoding gives the tokens of plain decoding, in fewer steps.

Blocks of 2 tokens and 7 drafts throughout, so that drafts cross several blocks; and a pool that is too small for all, so that they are
often more than there is room for.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_engine import check_engine

import jaxpage
from jaxpage import Engine, EngineOptions, Features, SamplingParams, Speculation
from jaxpage.engine import options as engine_options
from jaxpage.engine.drafts import look_up
from models import Decoder

KINDS = ("lookup", "other model", "same model")
FEATURES = Features(random=True, truncated=False, penalised=True, num_biases=0, num_stop_ids=1, num_logprobs=1)
NUM_DRAFTS = 7


@pytest.fixture(scope="module", autouse=True)
def few_programs(tmp_path_factory):
    """Compiling takes most of the time here."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_options, "SEQ_BUCKETS", (256,))
        yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def model(tiny):
    """Few token ids, so that all of them come again and again; and scores far enough apart."""
    decoder = Decoder(dataclasses.replace(tiny.config, vocab_size=16), rngs=nnx.Rngs(0))
    return jax.tree.map(lambda weight: weight * 4 if weight.ndim == 2 else weight, decoder)


@pytest.fixture(scope="module")
def engines(model, few_programs):
    """An engine of each kind, made when it is first asked for; each runs many tests."""
    sizes = dataclasses.replace(model.config, num_layers=1, num_heads=1, num_kv_heads=1)
    chosen = {
        "plain": {},
        "lookup": {"speculation": Speculation(NUM_DRAFTS)},
        "other model": {"speculation": Speculation(NUM_DRAFTS), "draft_model": Decoder(sizes, rngs=nnx.Rngs(1))},
        "same model": {"speculation": Speculation(NUM_DRAFTS), "draft_model": model, "preemption": "swap", "swap_bytes": 2**24},
    }
    made: dict[str, Engine] = {}

    def find(kind: str) -> Engine:
        if kind not in made:
            made[kind] = make_engine(model, **chosen[kind])
        return made[kind]

    return find


def make_engine(model, draft_model=None, **options):
    sizes = {"num_blocks": 60, "block_size": 2, "max_seqs": 4, "max_length": 64, "tokens_per_pass": 16, "steps_per_round": 16}
    return Engine(model, EngineOptions(**sizes, features=FEATURES, **options), draft_model=draft_model)


def run(engine, requests):
    """Completions in the order of the requests, and what they added to the engine's counts; every step leaves a sound cache."""
    before = engine.stats()
    names = [engine.submit(prompt, params) for prompt, params in requests]
    ends = {}
    while len(ends) < len(names):
        ends |= {update.prompt_index: update.completion for update in engine.step() if update.completion is not None}
        check_engine(engine)
    after = engine.stats()
    counts = after._replace(**{name: getattr(after, name) - getattr(before, name) for name in after._fields})
    return [ends[name] for name in names], counts


def prompts(count, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 16, rng.integers(1, 12)).tolist() for _ in range(count)]


REQUESTS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logprobs=1),
    SamplingParams(max_tokens=25, temperature=1.0, seed=5, logprobs=0),
    SamplingParams(max_tokens=35, temperature=0.6, seed=6, frequency_penalty=0.5),
    SamplingParams(max_tokens=50, temperature=0.8, seed=7, stop_ids=(3,)),
    SamplingParams(max_tokens=50, temperature=0.8, seed=8, stop_ids=(5,), min_tokens=9),
    *(SamplingParams(max_tokens=count) for count in (1, 2, 3, 9)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_plain_decoding(engines, kind):
    """Greedy and sampled, with penalties, stop ids, and ends in the middle of drafts that were right."""
    requests = list(zip(prompts(len(REQUESTS), 0), REQUESTS, strict=True))
    plain, _ = run(engines("plain"), requests)
    drafted, counts = run(engines(kind), requests)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        if one.logprobs is not None:
            assert [token.token_id for token in other.logprobs] == list(other.token_ids)
            for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
                np.testing.assert_allclose(ours.logprob, theirs.logprob, rtol=0, atol=1e-4)
    assert {"stop", "length"} == {one.finish_reason for one in plain}
    assert 0 < counts.kept_drafts <= counts.drafted_tokens
    assert kind == "same model" or counts.kept_drafts < counts.drafted_tokens


def test_a_model_that_drafts_for_itself_is_always_right(engines):
    """Also after a prefix hit and a way through host memory: the drafts' keys and values go where the model's go."""
    same = [(prompt, SamplingParams(max_tokens=33, temperature=temperature, seed=1)) for prompt in prompts(6, 1) for temperature in (0, 1)]
    _, first = run(engines("same model"), same)
    _, again = run(engines("same model"), same)
    assert first.preemptions > 0
    assert again.hit_tokens > first.hit_tokens
    for counts in (first, again):
        assert counts.drafted_tokens > counts.tokens / 2
        assert counts.kept_drafts == counts.drafted_tokens


@pytest.mark.parametrize("kind", ["lookup", "other model"])
def test_sampled_tokens_have_the_frequencies_of_the_model(engines, model, kind):
    """The first token comes from the prompt's pass. The three after it, some of them drafts, against the model's own probabilities."""
    prompt, samples, temperature = [1, 2, 7, 1, 2, 7, 1, 2], 400, 1.2
    requests = [(prompt, SamplingParams(max_tokens=4, temperature=temperature, seed=seed)) for seed in range(samples)]
    done, counts = run(engines(kind), requests)
    assert 0 < counts.kept_drafts < counts.drafted_tokens
    tokens = np.array([one.token_ids for one in done])
    ways = np.array(list(itertools.product(range(16), repeat=3)))
    texts = np.concatenate([np.tile(prompt, (len(ways), 1)), ways], axis=1)
    scores = np.asarray(jax.jit(lambda model, texts: model(texts))(model, texts), np.float64)[:, len(prompt) - 1 :] / temperature
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    way = np.prod([np.take_along_axis(chances[:, place], ways[:, [place]], axis=1) for place in range(3)], axis=0)
    np.testing.assert_allclose(way.sum(), 1, rtol=1e-6)
    for place in (1, 2):
        expected = np.bincount(ways[:, place], way[:, 0], minlength=16) * samples
        check_frequencies(np.bincount(tokens[:, place], minlength=16), expected)
    check_frequencies(np.bincount(tokens[:, 3], minlength=16), (way * chances[:, 3]).sum(axis=0) * samples)


def check_frequencies(found, expected):
    """A chi-squared test over the tokens that are expected often enough; one in 10,000 right samplers fails for a fixed seed."""
    often = expected >= 5
    found, expected = (np.append(counts[often], counts[~often].sum()) for counts in (found, expected))
    expected = np.maximum(expected, 1e-9)
    freedom = often.sum()
    assert freedom >= 4
    statistic = ((found - expected) ** 2 / np.maximum(expected, 1)).sum()
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty, 1931


def test_lookup_against_plain_python():
    rng = np.random.default_rng(3)
    history = rng.integers(0, 3, (64, 24))
    last = rng.integers(0, 24, 64)
    for ngram, num_drafts in ((1, 2), (2, 5), (3, 4), (5, 30)):
        drafts, found = jax.jit(look_up, static_argnums=(2, 3))(history, last, ngram, num_drafts)
        for row in range(64):
            expected = plain_lookup(history[row, : last[row] + 1].tolist(), ngram, num_drafts)
            assert bool(found[row]) == (expected is not None)
            if expected is not None:
                assert drafts[row].tolist() == expected


def plain_lookup(tokens, ngram, num_drafts):
    for count in range(ngram, min(2, ngram) - 1, -1):
        for end in range(len(tokens) - 1, count - 1, -1):
            if tokens[end - count : end] == tokens[len(tokens) - count :]:
                tokens = list(tokens)
                for place in range(num_drafts):
                    tokens.append(tokens[end + place])
                return tokens[-num_drafts:]
    return None


@pytest.mark.parametrize("name", ["num_drafts", "ngram"])
@pytest.mark.parametrize("value", [0, -1, 65, True, 2.0, None])
def test_speculation_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer from 1 to"):
        Speculation(**{name: value})


def test_a_draft_model_that_does_not_fit_is_refused(model, tiny):
    with pytest.raises(ValueError, match="needs `speculation`"):
        make_engine(model, draft_model=model)
    with pytest.raises(ValueError, match="vocabulary of 16 tokens, got 97"):
        make_engine(model, draft_model=tiny, speculation=Speculation())


@pytest.mark.slow
def test_the_real_model_says_what_it_says_alone(smollm2):
    texts = ["def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):", "1, 2, 3, 4, 5, 6, 7,"]
    ids = [smollm2.tokenizer.encode(text) for text in texts]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    lean = Features(random=False, truncated=False, penalised=False, num_biases=0, num_stop_ids=0, num_logprobs=None)
    options = EngineOptions(num_blocks=32, max_seqs=2, max_length=128, tokens_per_pass=64, features=lean, speculation=Speculation())
    engine = Engine(smollm2.decoder, options)
    assert [one.token_ids for one in engine.generate(ids, params)] == [
        one.token_ids for one in jaxpage.generate(smollm2.decoder, ids, params)
    ]
    assert engine.stats().kept_drafts > 0
