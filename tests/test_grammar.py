"""Grammars as constraints, with SmolLM2's tokenizer: masks token by token, and whole texts from the model."""

import json
import re
import sys

import numpy as np
import pytest

from jaxpage import Engine, EngineOptions, Features, SamplingParams
from models import GrammarCompiler
from models.formats.gguf_file import read_gguf
from models.formats.gguf_tokenizer import read_tokenizer
from models.tokenizer import Tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf):
    return read_tokenizer(read_gguf(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    """For a model whose vocabulary is padded beyond the tokenizer's."""
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 40)


@pytest.mark.parametrize("more", [0, 1, 31, 32, 40])
def test_a_mask_has_just_the_words_that_the_vocabulary_takes(tokenizer, more):
    constraint = GrammarCompiler(tokenizer, 49152 + more).regex("a")
    assert len(constraint([])) == len(constraint([5, 6])) == 1536 + -(-more // 32)


def allowed(constraint, token_ids):
    """The ids of a mask, by plain arithmetic."""
    words = constraint(token_ids)
    return {word * 32 + bit for word in np.flatnonzero(words) for bit in range(32) if int(words[word]) >> bit & 1}


def test_a_mask_has_just_the_tokens_that_go_on(tokenizer, compiler):
    constraint = compiler.regex("(yes|no), [0-9]{2}")
    (end,) = tokenizer.eos_ids
    assert {tokenizer.decode([token]) for token in allowed(constraint, [])} == {"n", "y", "no", "ye", "yes"}
    ids = tokenizer.encode("yes, 12")
    for place, token in enumerate(ids):
        assert token in allowed(constraint, ids[:place])
        assert end not in allowed(constraint, ids[:place])
    assert allowed(constraint, ids) == {end}
    assert allowed(constraint, [*ids, end]) == set()


def test_a_mask_depends_on_the_tokens_alone_not_on_those_asked_about_before(tokenizer, compiler):
    constraint = compiler.regex("a+b?")
    (end,) = tokenizer.eos_ids
    one, other = tokenizer.encode("aaa"), tokenizer.encode("ab")
    for ids in (one, other, [*one, end], [], [*one, end, end], tokenizer.encode("c"), one[:1], [end], [*one, 5], one):
        assert allowed(constraint, ids) == allowed(compiler.regex("a+b?"), ids)
    assert end in allowed(constraint, one)
    assert allowed(constraint, tokenizer.encode("c")) == set()


def test_what_llguidance_does_not_take_is_refused_with_its_reason(compiler):
    with pytest.raises(ValueError, match=r"(?s)llguidance does not take this regular expression: .*unclosed group"):
        compiler.regex("(a")
    with pytest.raises(ValueError, match=r"llguidance does not take this JSON schema: .*nonsense"):
        compiler.json_schema({"type": "nonsense"})
    with pytest.raises(ValueError, match=r"(?s)llguidance does not take this grammar: .*foo"):
        compiler.lark("start: foo")


def test_a_compiler_says_what_it_lacks(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="vocab_size must be at least the tokenizer's 49152, got 100"):
        GrammarCompiler(tokenizer, 100)
    with pytest.raises(ValueError, match="the tokenizer must have an end of text"):
        GrammarCompiler(Tokenizer(tokenizer.backend), 49152)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"grammars need llguidance: pip install 'jaxpage\[constrained\]'"):
        GrammarCompiler(tokenizer, 49152)


@pytest.mark.slow
def test_smollm2_writes_what_the_grammar_says(smollm2):
    """Three constraints and a free request together; two samples share one constraint."""
    tokenizer, vocab_size = smollm2.tokenizer, smollm2.decoder.config.vocab_size
    features = Features(random=True, truncated=False, penalised=False, num_biases=0, num_stop_ids=1, num_logprobs=None, constrained=True)
    options = EngineOptions(num_blocks=64, max_seqs=4, max_length=128, tokens_per_pass=64, features=features)
    engine = Engine(smollm2.decoder, options, eos_ids=tokenizer.eos_ids, detokenize=tokenizer.decode)
    compiler = GrammarCompiler(tokenizer, vocab_size)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    prompt = tokenizer.chat([{"role": "user", "content": "Name a person and tell me their age, as JSON."}])
    params = SamplingParams(max_tokens=40)
    by_schema = engine.submit(prompt, params, allowed_tokens=compiler.json_schema(schema))
    shared = compiler.regex(r"[A-Z][a-z]{2,8} is [1-9][0-9] years old\.")
    samples = [engine.submit(prompt, SamplingParams(max_tokens=40, temperature=1.0, seed=seed), allowed_tokens=shared) for seed in (1, 2)]
    free = engine.submit(prompt, params)
    done = {}
    while engine.unfinished:
        done |= {update.prompt_index: update.completion for update in engine.step() if update.completion is not None}
    value = json.loads(done[by_schema].text)
    assert set(value) == {"name", "age"}
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    for name in samples:
        assert re.fullmatch(r"[A-Z][a-z]{2,8} is [1-9][0-9] years old\.", done[name].text)
    assert done[samples[0]].text != done[samples[1]].text
    assert {done[name].finish_reason for name in (by_schema, *samples)} == {"stop"}
    (alone,) = engine.generate([prompt], params)
    assert alone.token_ids == done[free].token_ids
