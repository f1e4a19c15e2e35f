"""Strict flags, and the models that tests share."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with libtpu installed JAX would look for a TPU first

import jax
import pytest
from flax import nnx

from jaxpage.fetch import fetch_model
from models import Decoder, LoadedModel, ModelConfig, load_model

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def smollm2_gguf() -> pathlib.Path:
    """SmolLM2-135M-Instruct as a GGUF file, fetched once."""
    return fetch_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: pathlib.Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 with its tokenizer."""
    return load_model(smollm2_gguf, dtype="float32")


@pytest.fixture(scope="session")
def tiny() -> Decoder:
    """A decoder of random weights, small enough to run many times."""
    config = ModelConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_length=256
    )
    return Decoder(config, rngs=nnx.Rngs(0))
