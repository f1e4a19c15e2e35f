"""Checkpoints of our own: bit-exact, never half finished, never written over something."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_hf import parameters

import models
from jaxpage.checkpoint import restore_arrays, save_arrays
from models.formats import orbax

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def loaded():
    return models.load_model(GOLDEN / "llama3_rope")


@pytest.mark.parametrize("family", ["llama", "llama3_rope", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_exact(family, dtype, tmp_path):
    original = models.load_model(GOLDEN / family, dtype=dtype)
    models.save_checkpoint(original, tmp_path / "saved")
    again = models.load_model(tmp_path / "saved", dtype=dtype)
    ours, theirs = parameters(original), parameters(again)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype == dtype
        assert value.tobytes() == theirs[name].tobytes(), name
    assert again.decoder.config == original.decoder.config and hash(again.decoder.config) == hash(original.decoder.config)
    assert again.name == original.name
    text = "the <|im_end|> 🙂"
    assert again.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert again.tokenizer.eos_ids == original.tokenizer.eos_ids
    messages = [{"role": "user", "content": text}]
    assert again.tokenizer.chat(messages) == original.tokenizer.chat(messages)


def test_other_dtype(loaded, tmp_path):
    models.save_checkpoint(loaded, tmp_path / "saved")
    again = parameters(models.load_model(tmp_path / "saved", dtype="bfloat16"))
    for name, value in parameters(loaded).items():
        np.testing.assert_array_equal(value.astype(jnp.bfloat16), again[name])


def test_changed_weights_are_what_is_saved(loaded, tmp_path):
    loaded.decoder.norm.weight[...] = loaded.decoder.norm.weight[...] * 2
    models.save_checkpoint(loaded, tmp_path / "saved")
    np.testing.assert_array_equal(parameters(models.load_model(tmp_path / "saved"))["norm.weight"], parameters(loaded)["norm.weight"])


def test_never_over_something(loaded, tmp_path):
    (tmp_path / "saved").mkdir()
    models.save_checkpoint(loaded, tmp_path / "saved")  # an empty folder is fine
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        models.save_checkpoint(loaded, tmp_path / "saved")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        models.save_checkpoint(loaded, tmp_path / "file")


def test_a_failure_leaves_nothing(loaded, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(models.Tokenizer, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        models.save_checkpoint(loaded, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_crash_does_not_look_finished(loaded, tmp_path, monkeypatch):
    """A killed process cleans up nothing; what it leaves is refused, and does not stand in the way."""
    with monkeypatch.context() as patch:
        patch.setattr(models.Tokenizer, "save", lambda *arguments: 1 / 0)
        patch.setattr(orbax.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(ZeroDivisionError):
            models.save_checkpoint(loaded, tmp_path / "saved")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("saved.") and left.suffix == ".partial"
    with pytest.raises(ValueError, match="holds no model that can be loaded"):
        models.load_model(left)
    with pytest.raises(FileNotFoundError):
        models.load_model(tmp_path / "saved")
    models.save_checkpoint(loaded, tmp_path / "saved")
    models.load_model(tmp_path / "saved")


def damage_version(folder):
    header = json.loads((folder / "jaxpage.json").read_text())
    (folder / "jaxpage.json").write_text(json.dumps(header | {"version": 2}))


def damage_field(folder):
    header = json.loads((folder / "jaxpage.json").read_text())
    header["model"]["experts"] = 8
    (folder / "jaxpage.json").write_text(json.dumps(header))


def damage_size(folder):
    header = json.loads((folder / "jaxpage.json").read_text())
    header["model"]["vocab_size"] = 263
    (folder / "jaxpage.json").write_text(json.dumps(header))


def damage_data(folder):
    for file in (folder / "params").rglob("d/*"):
        file.unlink()


def damage_json(folder):
    (folder / "jaxpage.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_version, r"jaxpage\.json: version 2 is not supported; supported: 1"),
        (damage_field, r"jaxpage\.json does not describe a model .*experts"),
        (damage_size, r"params cannot be restored: Requested shape: \(263, 32\)"),
        (damage_data, r"params cannot be restored"),
        (damage_json, r"jaxpage\.json is not valid JSON"),
    ],
)
# Orbax leaves its readers behind when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_damaged(loaded, damage, message, tmp_path):
    models.save_checkpoint(loaded, tmp_path / "saved")
    damage(tmp_path / "saved")
    with pytest.raises(ValueError, match=message) as caught:
        models.load_model(tmp_path / "saved")
    assert "\n" not in str(caught.value)


def test_any_pytree(tmp_path):
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": (jnp.ones(3, jnp.int32), jnp.zeros((), jnp.bfloat16))}
    save_arrays(tmp_path / "tree", tree)
    again = restore_arrays(tmp_path / "tree", tree)
    np.testing.assert_array_equal(again["a"], tree["a"])
    assert [leaf.dtype for leaf in again["b"]] == [jnp.int32, jnp.bfloat16]
    with pytest.raises(ValueError, match="already exists"):
        save_arrays(tmp_path / "tree", tree)
    with pytest.raises(ValueError, match="cannot be restored"):
        restore_arrays(tmp_path / "tree", {"a": tree["a"]})
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        restore_arrays(tmp_path / "none", tree)
