"""The real model against two independent engines: token ids and log-probabilities of SmolLM2-135M-Instruct in float32.

`data/smollm2_greedy.json` was computed by transformers on the weights dequantised to float32; llama.cpp agrees on every id.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
from helpers_hf import write_hugging_face_folder

import jaxpage
from models import LoadedModel, load_model, save_checkpoint

REFERENCE = json.loads((pathlib.Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPTS = list(REFERENCE["prompts"].values())
IDS = [prompt["prompt_ids"] for prompt in PROMPTS]
GREEDY = [tuple(prompt["greedy_ids"]) for prompt in PROMPTS]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Tests of the same shapes share their compiled programs: compiling takes most of the time here."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def greedy(loaded: LoadedModel, count: int = 20, prompts=IDS, **options):
    params = jaxpage.SamplingParams(max_tokens=count, logprobs=5, prompt_logprobs=True, ignore_eos=True)
    return jaxpage.generate(loaded.decoder, prompts, params, **options)


@pytest.mark.parametrize("block_size", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 8, 64))])
def test_ids_and_logprobs_are_those_of_the_reference_engines(smollm2, block_size):
    for done, ids, prompt in zip(greedy(smollm2, block_size=block_size), GREEDY, PROMPTS, strict=True):
        assert done.token_ids == ids
        assert done.prompt_logprobs[0] is None
        np.testing.assert_allclose(done.prompt_logprobs[1:], prompt["prompt_logprobs"][1:], rtol=0, atol=1e-3)
        for token, best in zip(done.logprobs, prompt["top5"], strict=True):
            assert [token_id for token_id, _ in token.top] == best["ids"]
            np.testing.assert_allclose([logprob for _, logprob in token.top], best["logprobs"], rtol=0, atol=1e-3)
            assert token.logprob == pytest.approx(token.top[0][1], abs=1e-5)


def test_prompts_are_tokenized_as_the_reference_does(smollm2):
    for prompt in PROMPTS:
        assert smollm2.tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]


def test_bfloat16_agrees_on_the_first_tokens(smollm2_gguf):
    loaded = load_model(smollm2_gguf, dtype="bfloat16")
    for done, ids in zip(greedy(loaded, count=4, cache_dtype="bfloat16"), GREEDY, strict=True):
        assert done.token_ids[:2] == ids[:2]


def test_a_hugging_face_folder_and_a_checkpoint_give_the_same_ids(smollm2, tmp_path):
    write_hugging_face_folder(smollm2, tmp_path / "folder")
    save_checkpoint(smollm2, tmp_path / "checkpoint")
    for source in ("folder", "checkpoint"):
        loaded = load_model(tmp_path / source)
        assert [done.token_ids for done in greedy(loaded)] == GREEDY
        assert loaded.tokenizer.encode(PROMPTS[1]["text"]) == IDS[1]


@pytest.mark.slow
def test_eight_prompts_at_once_give_each_its_own_ids(smollm2):
    """Different lengths, three of them with known answers; the others must give what they give alone."""
    tokenizer = smollm2.tokenizer
    texts = ["Once upon a time", "def add(a, b):", "1, 2, 3, 4,", "The sea", "Dear Sir or Madam, I am writing to"]
    prompts = [*IDS, *(tokenizer.encode(text) for text in texts)]
    decoder = jaxpage.BatchDecoder(smollm2.decoder)
    params = jaxpage.SamplingParams(max_tokens=20, ignore_eos=True)

    def run(prompts):
        done = sorted((update.completion for update in decoder.run(prompts, params) if update.completion), key=lambda each: each.index)
        return [each.token_ids for each in done]

    together = run(prompts)
    assert together[:3] == GREEDY
    for prompt, ids in zip(prompts[3:], together[3:], strict=True):
        assert run([prompt]) == [ids]


@pytest.mark.slow
def test_a_seeded_sequence_gives_the_same_tokens_alone_and_in_a_batch(smollm2):
    decoder = jaxpage.BatchDecoder(smollm2.decoder)
    mates = jaxpage.SamplingParams(max_tokens=16, temperature=1.3, seed=99)
    seeded = jaxpage.SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, top_k=50, seed=7)
    together = {update.prompt_index: update.completion for update in decoder.run(IDS, [mates, seeded, mates]) if update.completion}
    (alone,) = [update.completion for update in decoder.run([IDS[1]], seeded) if update.completion]
    assert together[1].token_ids == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tpu_kernels_give_the_same_ids(smollm2_gguf, dtype):
    loaded = load_model(smollm2_gguf, dtype=dtype)
    params = jaxpage.SamplingParams(max_tokens=4, ignore_eos=True)
    with jaxpage.interpret_kernels():
        done = jaxpage.generate(loaded.decoder, IDS, params, implementation="tpu", cache_dtype=dtype)
    assert [each.token_ids for each in done] == [ids[:4] for ids in GREEDY]
