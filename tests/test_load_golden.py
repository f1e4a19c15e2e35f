"""Loaded models against logits of an independent implementation (golden/make_goldens.py)."""

import pathlib

import numpy as np
import pytest

import models

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ("llama", "llama3_rope", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family):
    loaded = models.load_model(GOLDEN / family)
    golden = np.load(GOLDEN / family / "logits.npz")
    logits = loaded.decoder(golden["tokens"])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4)
    assert loaded.name == family


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close(family):
    loaded = models.load_model(GOLDEN / family, dtype="bfloat16")
    golden = np.load(GOLDEN / family / "logits.npz")
    error = np.asarray(loaded.decoder(golden["tokens"])) - golden["logits"]
    assert np.sqrt(np.mean(error**2)) < 0.05 * golden["logits"].std()


def test_the_goldens_cover_what_sets_the_families_apart():
    configs = {family: models.load_model(GOLDEN / family).decoder.config for family in FAMILIES}
    assert configs["llama"].tie_embeddings and configs["qwen3"].tie_embeddings and not configs["mistral"].tie_embeddings
    assert configs["llama3_rope"].rope_factors is not None and len(set(configs["llama3_rope"].rope_factors)) == 3
    assert configs["mistral"].windows == (5, 5)
    assert configs["qwen2"].windows == (None, 6) and configs["qwen2"].qkv_bias
    assert configs["qwen3"].qk_norm and configs["qwen3"].head_dim != configs["qwen3"].hidden_size // configs["qwen3"].num_heads
