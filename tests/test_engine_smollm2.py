"""A real model through the engine: the same tokens, whatever happens to a request on its way."""

import numpy as np
import pytest
from helpers_engine import check_engine

import jaxpage
from jaxpage import Engine, EngineOptions, Features, SamplingParams
from jaxpage.programs import Programs

pytestmark = pytest.mark.slow

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "Water boils at",
    "The three primary colours are",
    "In the beginning",
    "A list of prime numbers: 2, 3, 5,",
)
GREEDY = SamplingParams(max_tokens=16)
LEAN = Features(random=True, truncated=False, penalised=False, num_biases=0, num_stop_ids=1, num_logprobs=None)


@pytest.fixture(scope="module")
def prompts(smollm2):
    return [smollm2.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def wanted(smollm2, prompts):
    done = jaxpage.generate(smollm2.decoder, prompts, GREEDY, eos_ids=smollm2.tokenizer.eos_ids)
    return [each.token_ids for each in done]


@pytest.fixture(scope="module")
def make(smollm2):
    programs = Programs()

    def make_engine(num_blocks, **options):
        chosen = {"max_seqs": 6, "max_length": 128, "tokens_per_pass": 64, "steps_per_round": 8, "features": LEAN, **options}
        options = EngineOptions(num_blocks=num_blocks, **chosen)
        return Engine(smollm2.decoder, options, eos_ids=smollm2.tokenizer.eos_ids, programs=programs)

    return make_engine


@pytest.mark.parametrize("options", [{}, {"preemption": "swap", "swap_bytes": 10**9}, {"prefix_index": "hash"}], ids=str)
def test_the_tokens_of_generate(make, prompts, wanted, options):
    """In a pool of 9 blocks, which 6 prompts outgrow."""
    engine = make(10, **options)
    for _ in range(2):  # the second time prefixes are hits
        assert [each.token_ids for each in engine.generate(prompts, GREEDY)] == wanted
        check_engine(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.hit_tokens > 0 or "prefix_index" in options  # these prompts are shorter than a block


def test_a_restored_engine_goes_on_with_the_same_tokens(make, smollm2, prompts, wanted, tmp_path):
    engine = make(10)
    names = [engine.submit(prompt, GREEDY) for prompt in prompts]
    produced = {name: [] for name in names}
    while sum(map(len, produced.values())) < 40 or not engine.stats().preemptions:
        for update in engine.step():
            produced[update.prompt_index].extend(update.token_ids)
    assert engine.unfinished > 1
    engine.save(tmp_path)
    restored = Engine.restore(tmp_path, smollm2.decoder, engine.options, eos_ids=smollm2.tokenizer.eos_ids, programs=engine.programs)
    engine.close()
    while restored.unfinished:
        for update in restored.step():
            produced[update.prompt_index].extend(update.token_ids)
        check_engine(restored)
    assert [tuple(produced[name]) for name in names] == [tuple(tokens) for tokens in wanted]


def test_each_sample_is_that_of_its_own_seed_alone(make, smollm2, prompts):
    engine = make(10)
    asked = [SamplingParams(max_tokens=8, temperature=1.0, seed=seed) for seed in range(3)]
    first = engine.submit(prompts[1], asked[0])
    names = [first, *(engine.fork(first, each, from_prompt=True) for each in asked[1:])]
    ends = {}
    while engine.unfinished:
        ends |= {update.prompt_index: update.completion.token_ids for update in engine.step() if update.completion is not None}
    alone = [jaxpage.generate(smollm2.decoder, [prompts[1]], each, eos_ids=smollm2.tokenizer.eos_ids)[0].token_ids for each in asked]
    assert [ends[name] for name in names] == alone
    assert len(set(alone)) == 3


def test_prompt_logprobs_are_the_same_with_a_hit(make, prompts):
    engine = make(10)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=True)
    first, second = (engine.generate([prompts[1]], asked)[0].prompt_logprobs for _ in range(2))
    np.testing.assert_allclose(first[1:], second[1:], atol=1e-4)


def test_three_greetings_are_one_group_of_blocks_and_three_children(make, smollm2):
    engine = make(200, block_size=1)
    for rest in (", nerede", "! Bug", " ve"):
        engine.generate([smollm2.tokenizer.encode("Merhaba dünya" + rest)], SamplingParams(max_tokens=2))
    lines = engine.index.render(smollm2.tokenizer.decode).splitlines()
    assert len([line for line in lines if line.startswith("└─ ")]) == 1
    assert lines[1].endswith(": Merhaba dünya")
    assert len([line for line in lines if line.startswith(("   ├─ ", "   └─ "))]) == 3
    check_engine(engine)
