"""What may be given to load_model, and what is said about anything else."""

import pathlib
import shutil

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import models

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("source", ["/no/such/model.gguf", "nothing-here", "a/b/c", "./org/name"])
def test_no_such_path(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist: give a \.gguf file, a Hugging Face folder.*or a repository as org/name"):
        models.load_model(source)


def test_folder_without_a_model(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no model that can be loaded: expected a \.gguf file"):
        models.load_model(tmp_path)


def test_file_that_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt holds no model"):
        models.load_model(tmp_path / "notes.txt")


def test_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = {}

    def download(repository, *, allow_patterns, ignore_patterns):
        asked.update(repository=repository, allow=allow_patterns)
        return str(shutil.copytree(GOLDEN / "llama", tmp_path / "cache" / "0123abcd"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = models.load_model("someone/tiny-llama")
    assert loaded.name == "someone/tiny-llama"  # the folder is called after a commit
    assert asked["repository"] == "someone/tiny-llama"
    assert not any("bin" in pattern for pattern in asked["allow"])


def test_repository_that_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def download(*arguments, **options):
        raise LocalEntryNotFoundError("Cannot reach the Hub.\nMore text.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    message = r"someone/tiny-llama is neither a path here nor a repository .* \(Cannot reach the Hub\.\): check"
    with pytest.raises(FileNotFoundError, match=message) as caught:
        models.load_model("someone/tiny-llama")
    assert "\n" not in str(caught.value)


def test_a_dtype_is_checked_before_a_download(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *arguments, **options: pytest.fail("downloaded"))
    with pytest.raises(ValueError, match="dtype must be one of"):
        models.load_model("someone/tiny-llama", dtype="float8")


def test_a_path_may_be_text(monkeypatch):
    monkeypatch.chdir(GOLDEN)
    assert models.load_model("llama").name == "llama"
    monkeypatch.chdir(GOLDEN / "llama")
    assert models.load_model(".").name == "llama"
