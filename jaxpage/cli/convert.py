"""`jaxpage convert`."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from jaxpage.cli.fetch import load_named_model
from models import save_checkpoint

__all__ = ["Convert"]


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a model as an Orbax checkpoint folder, which every command loads like any other model."""

    model: Annotated[str, tyro.conf.Positional]
    """A name (smollm2-135m), a .gguf file, a Hugging Face folder, a checkpoint folder or a repository (org/name)."""
    out: Annotated[pathlib.Path, tyro.conf.Positional]
    """The folder to write; it must not exist or be empty."""
    dtype: str = "float32"
    """float32 or bfloat16."""

    def run(self) -> None:
        """Loads and saves."""
        save_checkpoint(load_named_model(self.model, self.dtype), self.out)
        print(self.out)
