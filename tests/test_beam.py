"""Beam search on the device against a plain one over the uncached decoder's logits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpage
from jaxpage.beam import beam_cache_config, beam_loop, beam_search
from jaxpage.programs import Programs

PROGRAMS = Programs()  # shared by all tests, so that each shape is compiled once
MAX_TOKENS = 7
PROMPTS = [np.random.default_rng(length).integers(97, size=length).tolist() for length in (1, 4, 9)]
uncached = jax.jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def model(tiny):
    """The tiny decoder with larger weights, so that tokens depend on each other but none is certain."""
    return jax.tree.map(lambda weight: weight * 4 if weight.ndim == 2 else weight, tiny)


@pytest.fixture(scope="module")
def next_logprobs(model):
    """Log-probabilities of the next token of a text in float64; texts are asked about again and again."""
    known = {}

    def ask(texts):
        new = [text for text in texts if text not in known]
        for start in range(0, len(new), 8):
            part = new[start : start + 8]
            tokens = np.zeros((8, 16), np.int32)
            for row, text in enumerate(part):
                tokens[row, : len(text)] = text
            logits = np.asarray(uncached(model, tokens), np.float64)
            for row, text in enumerate(part):
                scores = logits[row, len(text) - 1]
                known[text] = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        return [known[text] for text in texts]

    return ask


def plain_beam_search(next_logprobs, prompt, width, length_penalty, early_stopping, eos_ids, max_tokens=MAX_TOKENS):
    """(tokens, log-probability, score, whether it ended) of all hypotheses kept, the best first."""
    rows, done = [((), 0.0)], []
    for count in range(1, max_tokens + 1):
        candidates = []
        for (text, logprob), more in zip(rows, next_logprobs([(*prompt, *text) for text, _ in rows]), strict=True):
            candidates += [(logprob + more[token], (*text, token)) for token in range(97)]
        candidates.sort(reverse=True)
        for logprob, text in candidates[:width]:
            if text[-1] in eos_ids:
                done.append((text, logprob, logprob / count**length_penalty, True))
        done = sorted(done, key=lambda each: -each[2])[:width]
        rows = [(text, logprob) for logprob, text in candidates if text[-1] not in eos_ids][:width]
        if len(done) == width and (early_stopping or rows[0][1] / count**length_penalty <= done[-1][2]):
            return done
    done += [(text, logprob, logprob / max_tokens**length_penalty, False) for text, logprob in rows]
    return sorted(done, key=lambda each: -each[2])[:width]


@pytest.fixture(scope="module")
def eos_ids(next_logprobs):
    """Two tokens that beams come upon."""
    early = plain_beam_search(next_logprobs, PROMPTS[1], 1, 1.0, False, ())[0][0][2]
    late = plain_beam_search(next_logprobs, PROMPTS[2], 4, 1.0, False, ())[0][0][4]
    assert early != late
    return early, late


@pytest.mark.parametrize(
    ("width", "block_size", "prompts"),
    [(1, 4, PROMPTS[2:]), (4, 1, PROMPTS[2:]), (4, 4, PROMPTS), (4, 16, PROMPTS[2:]), (3, 4, PROMPTS[1:2])],
)
def test_the_hypotheses_are_those_of_a_plain_search(model, next_logprobs, eos_ids, width, block_size, prompts):
    reasons = set()
    for prompt, penalty, early in itertools.product(prompts, (-0.5, 0.0, 1.0, 2.0), (False, True)):
        found = beam_search(
            model,
            prompt,
            width=width,
            max_tokens=MAX_TOKENS,
            length_penalty=penalty,
            early_stopping=early,
            num_return=width,
            eos_ids=eos_ids,
            block_size=block_size,
            programs=PROGRAMS,
        )
        wanted = plain_beam_search(next_logprobs, prompt, width, penalty, early, eos_ids)
        assert [each.token_ids for each in found] == [text for text, *_ in wanted]
        np.testing.assert_allclose([each.logprob for each in found], [each[1] for each in wanted], rtol=1e-4)
        np.testing.assert_allclose([each.score for each in found], [each[2] for each in wanted], rtol=1e-4)
        assert [each.finish_reason for each in found] == ["stop" if each[3] else "length" for each in wanted]
        reasons |= {each.finish_reason for each in found}
    assert reasons == {"stop", "length"} or width == 1


def test_fewer_are_returned_where_fewer_are_asked_for_and_the_context_ends_them(model):
    prompt = [token % 97 for token in range(255)]
    found = beam_search(model, prompt, width=3, max_tokens=50, num_return=2, programs=PROGRAMS)
    assert [len(each.token_ids) for each in found] == [2, 2]
    assert found[0].score >= found[1].score


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_block_is_free_afterwards_and_no_row_ran_short(model, eos_ids, block_size):
    """The pool has just the blocks that the search may need, shuffled, and what is unwritten is NaN."""
    prompt, width = PROMPTS[2], 4
    config = beam_cache_config(model.config, len(prompt), width, MAX_TOKENS, block_size, "float32")
    cache = jaxpage.init_cache(config, "xla")
    order = np.random.default_rng(0).permutation(np.arange(1, config.num_blocks))
    free = jnp.asarray(np.append(order, 0).astype(np.int32))
    storage = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache.storage)
    cache = cache._replace(pool=cache.pool._replace(free=free), storage=storage)
    cache, ok = jaxpage.reserve(cache, jnp.array([len(prompt) - 1, 0, 0, 0]))
    assert ok.all()
    tokens = jnp.asarray(prompt[:-1], jnp.int32)
    starts = jnp.array([0, *[len(prompt) - 1] * width])
    cache, _ = jax.jit(jaxpage.prefill)(model, cache, tokens, cache.table.lengths, starts)
    arguments = (np.int32(prompt[-1]), np.asarray(eos_ids, np.int32), np.float32(1), np.bool_(False))
    cache, finished = PROGRAMS.run(beam_loop, model, cache, *arguments, max_tokens=MAX_TOKENS, implementation=None)
    jaxpage.check_cache(cache)
    assert int(cache.pool.num_free) == config.num_blocks - 1
    found = beam_search(
        model, prompt, width=width, max_tokens=MAX_TOKENS, num_return=width, eos_ids=eos_ids, block_size=4, programs=PROGRAMS
    )
    assert [tuple(row[:count]) for row, count in zip(finished.tokens.tolist(), finished.counts, strict=True)] == [
        each.token_ids for each in found
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be an integer from 1 to 256, got 0"),
        ({"width": 2.0}, "width must be an integer from 1 to 256, got 2.0"),
        ({"num_return": 3}, "num_return must be an integer from 1 to 2, got 3"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
        ({"early_stopping": "never"}, "early_stopping must be True or False, got 'never'"),
        ({"eos_ids": (97,)}, "token id 97 in eos_ids is outside the vocabulary of 97"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"prompt": []}, "prompt 0 is empty"),
        ({"block_size": 0}, "block_size must be an integer from 1 to 2147483647, got 0"),
    ],
)
def test_what_cannot_run_is_refused(model, options, message):
    options = {"prompt": [1, 2], "width": 2, "max_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        beam_search(model, **options)
