"""GGUF files: written here with the format's own library, and a real one."""

import json
import pathlib

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_hf import hugging_face_tensors, parameters, write_hugging_face_folder

import models
from models.formats.gguf_file import GGUF_TENSOR_TYPES

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "model.layers": "blk",
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp keeps the query and key rows of a Llama: rotary pairs side by side."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(loaded, file, architecture, *, quantise=None, change=None, extra=()):
    """Writes a model; `change` edits the keys before they are written, `extra` are tensors to add."""
    config, backend = loaded.decoder.config, loaded.tokenizer.backend
    tokens = [backend.id_to_token(index) for index in range(loaded.tokenizer.vocab_size)]
    keys = {
        "general.name": "tiny",
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_length,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.rope.dimension_count": config.head_dim,
        f"{architecture}.rope.freq_base": config.rope_theta,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if loaded.tokenizer.is_special(index) else 1 for index in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": loaded.tokenizer.chat_template,
    }
    if config.windows:
        keys[f"{architecture}.attention.sliding_window"] = config.windows[0]
    keys |= change or {}
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(key, value)
    for name, value in hugging_face_tensors(loaded).items():
        if architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            value = interleave(value, config.num_heads if "q_proj" in name else config.num_kv_heads)
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if quantise is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, value)
    for name, value in extra:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same_parameters(first, second):
    ours, theirs = parameters(first), parameters(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def llama():
    return models.load_model(GOLDEN / "llama")


@pytest.fixture(scope="module")
def content(llama, tmp_path_factory):
    """The bytes of a good file."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(llama, file, "llama")
    return file.read_bytes()


@pytest.mark.parametrize(
    ("family", "architecture"), [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("llama3_rope", "llama")]
)
def test_every_family(family, architecture, tmp_path):
    original = models.load_model(GOLDEN / family)
    windows = original.decoder.config.windows
    change = {"qwen2.attention.sliding_window": None} if family == "qwen2" else {}  # the format has one window for all layers
    factors = original.decoder.config.rope_factors
    extra = [("rope_freqs.weight", np.array(factors, np.float32))] if factors else []
    write_gguf(original, tmp_path / "tiny.gguf", architecture, change=change, extra=extra)
    loaded = models.load_model(tmp_path / "tiny.gguf")
    assert_same_parameters(original, loaded)
    assert loaded.name == "tiny"
    assert loaded.tokenizer.eos_ids == original.tokenizer.eos_ids
    assert loaded.decoder.config.tie_embeddings == original.decoder.config.tie_embeddings
    assert loaded.decoder.config.windows == (None if family == "qwen2" else windows)
    if family != "qwen2":
        golden = np.load(GOLDEN / family / "logits.npz")
        np.testing.assert_allclose(loaded.decoder(golden["tokens"]), golden["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16])
def test_quantised(llama, kind, tmp_path):
    """Quantising works along rows, so the order of rows does not matter: the values must be exactly those of the library."""
    write_gguf(llama, tmp_path / "tiny.gguf", "llama", quantise=kind)
    loaded = parameters(models.load_model(tmp_path / "tiny.gguf"))
    for name, value in parameters(llama).items():
        expected = value if value.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)


def test_float16(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf", "llama", quantise=gguf.GGMLQuantizationType.F16)
    loaded = models.load_model(tmp_path / "tiny.gguf", dtype="bfloat16")
    expected = parameters(llama)["embed.weight"].astype(np.float16).astype(jnp.bfloat16)
    np.testing.assert_array_equal(parameters(loaded)["embed.weight"], expected)


@pytest.mark.parametrize("name", GGUF_TENSOR_TYPES)
def test_listed_tensor_types_are_those_the_library_reads(name):
    kind = gguf.GGMLQuantizationType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    assert gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind).dtype == np.float32


def test_folder_with_one_file(content, tmp_path):
    (tmp_path / "one.gguf").write_bytes(content)
    assert models.load_model(tmp_path).name == "tiny"
    (tmp_path / "two.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(one\.gguf, two\.gguf\): give the path of one"):
        models.load_model(tmp_path)


def test_file_is_known_by_its_content(content, tmp_path):
    (tmp_path / "blob").write_bytes(content)
    assert models.load_model(tmp_path / "blob").name == "tiny"


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 0.2, 0.5, 0.99])
def test_truncated(content, keep, tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ValueError, match=r"tiny\.gguf is truncated or not a GGUF file"):
        models.load_model(file)


def test_corrupt_header(content, tmp_path):
    """Whatever a damaged header says, the error is one that names the file."""
    generator = np.random.default_rng(0)
    file = tmp_path / "tiny.gguf"
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[generator.integers(0, 800)] = generator.integers(0, 256)
        file.write_bytes(damaged)
        try:
            models.load_model(file)
        except ValueError as error:
            assert "tiny.gguf" in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported; supported: 0"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling type 'yarn' is not supported; supported: none, linear"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4 is not supported"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length = 4 is not supported"),
        ({"llama.attention.head_count": [4, 4]}, r"llama.attention.head_count must be one positive integer for all layers, got \[4, 4\]"),
        ({"llama.block_count": None}, "metadata key 'llama.block_count' is missing"),
        ({"split.count": 2}, "one of 2 parts"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported; supported: default, gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre None is not supported"),
        ({"tokenizer.ggml.merges": ["h e", "x"]}, "merges holds 'x', which is not a pair"),
        ({"tokenizer.ggml.merges": ["h q"]}, "merges holds 'h q', which is not a pair of tokens that make a token"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type holds 2 entries for 264 tokens"),
        ({"tokenizer.ggml.eos_token_id": 264}, "tokenizer.ggml.eos_token_id is 264, but there are 264 tokens"),
        ({"llama.embedding_length": 64}, "the configuration asks for"),
    ],
)
def test_refused(llama, change, message, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf", "llama", change=change)
    with pytest.raises(ValueError, match=message) as caught:
        models.load_model(tmp_path / "tiny.gguf")
    assert "tiny.gguf" in str(caught.value)


def test_unsupported_architecture(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf", "falcon")
    with pytest.raises(ValueError, match="architecture 'falcon' is not supported; supported: llama, qwen2, qwen3"):
        models.load_model(tmp_path / "tiny.gguf")


def test_unsupported_tensor_type(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf", "llama", extra=[("blk.0.attn_sinks", np.ones(4, np.float64))])
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.attn_sinks' has type F64, which is not supported; supported: F32, F16"):
        models.load_model(tmp_path / "tiny.gguf")


def test_left_over_tensor(llama, tmp_path):
    write_gguf(llama, tmp_path / "tiny.gguf", "llama", extra=[("blk.0.attn_output.bias", np.ones(32, np.float32))])
    with pytest.raises(ValueError, match=r"no place in this model, the first is 'blk\.0\.attn_output\.bias'"):
        models.load_model(tmp_path / "tiny.gguf")


def test_linear_scaling(llama, tmp_path):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(llama, tmp_path / "a.gguf", "llama", change=scaling)
    assert models.load_model(tmp_path / "a.gguf").decoder.config.rope_factors == (4.0,) * 4
    write_gguf(llama, tmp_path / "b.gguf", "llama", change=scaling, extra=[("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32))])
    assert models.load_model(tmp_path / "b.gguf").decoder.config.rope_factors == (4.0, 8.0, 12.0, 16.0)


def test_real_file_and_the_same_as_hugging_face_folder(smollm2, tmp_path):
    loaded = smollm2
    assert loaded.decoder.config.num_layers == 30 and loaded.decoder.config.tie_embeddings
    assert loaded.tokenizer.eos_ids == (2,)
    write_hugging_face_folder(loaded, tmp_path / "hf", shards=2)
    again = models.load_model(tmp_path / "hf")
    assert_same_parameters(loaded, again)
    assert again.decoder.config == loaded.decoder.config
    conversation = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert again.tokenizer.chat(conversation) == loaded.tokenizer.chat(conversation)
    logits = again.decoder(jnp.array([loaded.tokenizer.encode("The capital of France is")]))
    assert loaded.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
