"""Loading a model from wherever it is: a file, a folder or a repository on the Hugging Face Hub."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from models.formats import gguf, hugging_face, orbax
from models.formats.common import LoadedModel, model_dtype

__all__ = ["LoadedModel", "load_model"]

# The first whose detect() says yes loads the path.
_FORMATS = ((orbax.detect, orbax.load), (gguf.detect, gguf.load), (hugging_face.detect, hugging_face.load))
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SOURCES = "a .gguf file, a Hugging Face folder (config.json with safetensors), a folder with one .gguf, or a jaxpage checkpoint"


def load_model(source: str | Path, dtype: str = "float32") -> LoadedModel:
    """Loads a decoder, its tokenizer and its name.

    Args:
      source: a `.gguf` file, a Hugging Face folder, a folder with one `.gguf`, a folder written by `save_checkpoint`, or the id
        ("org/name") of a repository on the Hugging Face Hub, which is downloaded once and then found on disk.
      dtype: dtype of the weights and activations, "float32" or "bfloat16".

    Raises:
      FileNotFoundError: there is no such path or repository, it cannot be reached, or a file in it is missing.
      ValueError: the dtype, format, architecture, tokenizer or tensor type is not supported, or a file is broken.
    """
    model_dtype(dtype)  # before anything is downloaded
    path = Path(source).expanduser()
    if path.exists():
        return _load_path(path, dtype)
    if not _REPOSITORY.fullmatch(str(source)):
        raise FileNotFoundError(f"{source} does not exist: give {_SOURCES}, or a repository as org/name")
    return _load_path(_download(str(source)), dtype)._replace(name=str(source))


def _load_path(path: Path, dtype: str) -> LoadedModel:
    for detect, load in _FORMATS:
        if detect(path):
            return load(path, dtype)
    raise ValueError(f"{path} holds no model that can be loaded: expected {_SOURCES}")


def _download(repository: str) -> Path:
    try:
        # Weights in pickles (.bin) are never fetched; the folders inside some repositories hold the same weights again.
        return Path(
            huggingface_hub.snapshot_download(repository, allow_patterns=["*.safetensors", "*.json", "*.jinja"], ignore_patterns=["*/*"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"{repository} is neither a path here nor a repository that can be read ({reason}): "
            "check the name, the network, and for a gated model `hf auth login`"
        ) from error
