"""Our own checkpoints: a folder with the configuration as JSON, the tokenizer files and the parameters written by Orbax."""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxpage.checkpoint import restore_arrays, save_arrays
from models.config import ModelConfig
from models.formats.common import LoadedModel, abstract_decoder, model_dtype
from models.formats.json_file import read_json
from models.tokenizer import Tokenizer

__all__ = ["detect", "load", "save_checkpoint"]

_HEADER = "jaxpage.json"
_PARAMS = "params"
_TOKENIZER = "tokenizer"
_VERSION = 1


def save_checkpoint(loaded: LoadedModel, folder: str | Path) -> None:
    """Writes a model as a checkpoint that `load_model` reads.

    The folder appears only when all of it is written: a crash leaves a "*.partial" folder beside it, which can be deleted.

    Raises:
      ValueError: the folder exists and is not empty.
    """
    target = Path(folder).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: give a new one, or delete it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    try:
        partial.chmod(0o755)  # what mkdir gives; temporary folders are private
        params = nnx.to_flat_state(nnx.state(loaded.decoder, nnx.Param))
        save_arrays(partial / _PARAMS, {_dotted(path): param[...] for path, param in params})
        loaded.tokenizer.save(partial / _TOKENIZER)
        header = {"version": _VERSION, "name": loaded.name, "model": dataclasses.asdict(loaded.decoder.config)}
        (partial / _HEADER).write_text(json.dumps(header, indent=2), encoding="utf-8")
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def detect(source: Path) -> bool:
    """Whether this is a folder that `save_checkpoint` wrote."""
    return (source / _HEADER).is_file()


def load(source: Path, dtype: str) -> LoadedModel:
    """Loads such a folder, whatever dtype it was saved with.

    Raises:
      ValueError: a file is broken, or written by a later version.
    """
    wanted = model_dtype(dtype)
    header = read_json(source / _HEADER)
    if header.get("version") != _VERSION:
        raise ValueError(f"{source / _HEADER}: version {header.get('version')!r} is not supported; supported: {_VERSION}")
    try:
        config, name = _config(header["model"]), header["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source / _HEADER} does not describe a model ({type(error).__name__}: {error})") from error
    graph, params = abstract_decoder(config, wanted)
    like = {_dotted(path): jax.ShapeDtypeStruct(param.get_raw_value().shape, wanted) for path, param in params.items()}
    arrays = restore_arrays(source / _PARAMS, like)
    filled = {path: param.replace(arrays[_dotted(path)]) for path, param in params.items()}
    return LoadedModel(nnx.merge(graph, nnx.from_flat_state(filled)), Tokenizer.load(source / _TOKENIZER), name)


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def _config(values: dict[str, Any]) -> ModelConfig:
    # JSON has no tuples, and a config must be hashable.
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return ModelConfig(**fields)
