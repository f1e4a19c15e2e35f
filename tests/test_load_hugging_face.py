"""Hugging Face folders: shards, configurations, and everything that must be refused rather than loaded wrongly."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from helpers_hf import parameters, write_hugging_face_folder
from safetensors.numpy import load_file, save_file

import models
from models.formats.hugging_face_config import read_config
from models.formats.rope import rope_factors

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny Llama, to be damaged."""
    return pathlib.Path(shutil.copytree(GOLDEN / "llama", tmp_path / "tiny"))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same_parameters(first, second):
    ours, theirs = parameters(first), parameters(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_written_folder_loads_to_the_same(family, shards, tmp_path):
    loaded = models.load_model(GOLDEN / family)
    write_hugging_face_folder(loaded, tmp_path / "again", shards)
    again = models.load_model(tmp_path / "again")
    assert_same_parameters(loaded, again)
    assert again.decoder.config == loaded.decoder.config
    assert again.tokenizer.eos_ids == loaded.tokenizer.eos_ids


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_cast_from_what_is_stored(folder, stored, dtype):
    change_tensors(folder, lambda tensors: tensors.update({name: value.astype(stored) for name, value in tensors.items()}))
    values = parameters(models.load_model(folder, dtype=dtype))
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].astype(dtype)
    assert values["embed.weight"].dtype == dtype
    np.testing.assert_array_equal(values["embed.weight"], expected)


def test_loaded_weights_can_be_trained(folder):
    """They are the module's own: changing them changes no file."""
    before = (folder / "model.safetensors").read_bytes()
    loaded = models.load_model(folder)
    loaded.decoder.norm.weight[...] = loaded.decoder.norm.weight[...] + 1
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_other_dtypes_are_refused(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got"):
        models.load_model(folder, dtype=dtype)


def test_missing_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ValueError, match=r"tiny: tensor 'model\.layers\.1\.self_attn\.k_proj\.weight' is missing"):
        models.load_model(folder)


def test_left_over_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": np.ones(4, np.float32)}))
    with pytest.raises(ValueError, match=r"model\.safetensors: 1 tensors have no place.*self_attn\.sinks"):
        models.load_model(folder)


def test_wrong_shape(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(31, np.float32)}))
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'model\.norm\.weight' has shape \(31,\).*\(32,\)"):
        models.load_model(folder)


def test_stacked_parts_are_checked_one_by_one(folder):
    """Rows missing from one projection and too many in the next would add up."""

    def shift(tensors):
        q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
        tensors[q], tensors[k] = tensors[k], tensors[q]

    change_tensors(folder, shift)
    with pytest.raises(ValueError, match=r"q_proj\.weight' has shape \(16, 32\)"):
        models.load_model(folder)


def test_harmless_leftovers(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    change_tensors(folder, add)
    assert_same_parameters(models.load_model(folder), models.load_model(GOLDEN / "llama"))


def test_head_that_differs_from_the_embedding_it_is_tied_to(folder):
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight' differs from the embedding"):
        models.load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.999])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        models.load_model(folder)


def test_unsupported_tensor_type(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(ValueError, match=r"tensor 'model\.norm\.weight' has type I8.*supported: F32, F16, BF16"):
        models.load_model(folder)


def test_missing_shard(tmp_path):
    write_hugging_face_folder(models.load_model(GOLDEN / "llama"), tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors does not exist, but .* names it"):
        models.load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", r"tokenizer\.json does not exist"),
        ("model.safetensors", r"holds no weights: expected model\.safetensors"),
    ],
)
def test_missing_files(folder, name, message):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        models.load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[]"])
def test_broken_json(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} (is not valid JSON|must hold a JSON object)"):
        models.load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architecture LlamaForSequenceClassification is not supported"),
        ({"model_type": None}, "is not supported; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq.* is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported; supported: default, linear, llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor', which is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each layer type .* are not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"num_attention_heads": 0}, "num_heads must be a positive integer"),
        ({"hidden_size": "big"}, "config.json"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ],
)
def test_refused_configurations(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        models.load_model(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_missing_size(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: 'hidden_size' is missing"):
        models.load_model(folder)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False}, None),
        ({"max_window_layers": 0, "layer_types": None}, (6, 6)),
        ({"layer_types": None}, (None, 6)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (6, None)),
    ],
)
def test_qwen_windows(tmp_path, changes, windows):
    config = json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert read_config(tmp_path / "config.json").windows == windows


def test_unknown_layer_type(tmp_path):
    config = json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["chunked_attention", "full_attention"]}))
    with pytest.raises(ValueError, match="layer type 'chunked_attention' is not supported; supported: sliding_attention, full_attention"):
        read_config(tmp_path / "config.json")


def test_both_ways_to_write_rope_settings(tmp_path):
    """Older files have rope_theta and rope_scaling, newer ones rope_parameters."""
    config = json.loads((GOLDEN / "llama3_rope" / "config.json").read_text())
    rope = dict(config.pop("rope_parameters"))
    old = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_config(tmp_path / "config.json") == read_config(GOLDEN / "llama3_rope" / "config.json")


def test_rope_factors():
    assert rope_factors({}, 8, 1e4) is None
    assert rope_factors({"type": "linear", "factor": 4.0}, 8, 1e4) == (4.0,) * 4
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = rope_factors(llama3 | {"original_max_position_embeddings": 8192}, 128, 500000.0)
    assert factors[0] == 1.0 and factors[-1] == 8.0 and list(factors) == sorted(factors)
